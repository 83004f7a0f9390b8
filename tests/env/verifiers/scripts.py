"""A policy that says what it is told, for tasksets and environments of verifiers."""

from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.models import info as model_info
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.lazy import tinker

TINY = str(EXAMPLE_DATA / "tiny_chat")
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def make_renderer() -> Renderer:
    return get_renderer(model_info.get_recommended_renderer_name(TINY), get_tokenizer(TINY), model_name=TINY)


class Script(TokenCompleter):
    """Call i is answered by reply i; the prompts are kept as ids and as text."""

    def __init__(self, *replies: str):
        self.replies, self.tokenizer = replies, get_tokenizer(TINY)
        self.asked, self.prompts = list[list[int]](), list[str]()

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        reply = self.replies[len(self.asked)]
        self.asked.append(model_input.to_ints())
        self.prompts.append(str(self.tokenizer.decode(self.asked[-1])))
        tokens = [*self.tokenizer.encode(reply, add_special_tokens=False), *(s for s in stop if isinstance(s, int))]
        return TokensWithLogprobs(tokens, [-0.5] * len(tokens))
