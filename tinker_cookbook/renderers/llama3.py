r"""The Llama 3 family: every message under a header of its role, ended by <|eot_id|>.

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 1+1?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>

This is the plain form of Llama 3.0, which the 3.1, 3.2 and 3.3 Instruct models read too. Their own chat templates also
open every conversation with a system message that names a knowledge cutoff and today's date; it is left out here, so
that a run does not depend on the day. Tools are left out on purpose: the family has no one format for them.

As in the template, white space around system and user text is taken off. An assistant message is kept as the model
wrote it, where the template would take it off too: so prompts extend each other.
"""

from tinker_cookbook.renderers.content import ensure_text
from tinker_cookbook.renderers.formats import EndTokenRenderer, Row, Token
from tinker_cookbook.renderers.renderer import RenderContext
from tinker_cookbook.renderers.types import Message

_HEADER_START, _HEADER_END = Token("<|start_header_id|>"), Token("<|end_header_id|>")


class Llama3Renderer(EndTokenRenderer):
    """Llama 3 Instruct: a header per role, text only."""

    format_name, roles = "Llama 3", ("system", "user", "assistant")
    names_speakers = True
    bos, end = Token("<|begin_of_text|>"), Token("<|eot_id|>")
    control_tokens = (_HEADER_START, _HEADER_END, end)
    reserved_tokens = ("<|end_of_text|>", "<|eom_id|>")
    has_extension_property = True

    def _write(self, message: Message, ctx: RenderContext) -> tuple[Row, Row]:
        role, text = message["role"], ensure_text(message["content"])
        return (_HEADER_START, role, _HEADER_END, "\n\n"), (text if role == "assistant" else text.strip(), self.end)
