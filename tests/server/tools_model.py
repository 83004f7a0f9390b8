"""The tiny model with a chat template that takes tools, and a question with a tool."""

import shutil
from pathlib import Path

from tests.server.serving import TINY_CHAT

TOOLS_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QUESTION = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 7 + 5?"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def model_with_tools(folder: Path) -> str:
    """A copy of the tiny model in `folder`, which does not exist yet. Returns its path."""
    shutil.copytree(TINY_CHAT, folder)
    (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return str(folder)
