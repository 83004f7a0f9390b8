"""As many prompts of ours as of the reference package equal the chat template, for every renderer whose template is known.

The templates stand in tests/renderers, in our own words. The conversations are those of the recordings, without the one that
forges a turn: templates and the reference package make control tokens of its text, ours never does.

    python -m tests.reference.test_templates        the counts, of which docs/renderers.md has the sum
"""

import json
from functools import cache
from typing import Any

import pytest
from jinja2 import TemplateError

from tests.child import ROOT
from tests.reference import cases
from tests.reference.compare import observations, tool_call
from tests.reference.observe import conversations_of
from tests.reference.subjects import FAMILIES
from tests.reference.write_tokenizers import family_tokenizer
from tests.renderers.families import FAMILIES as PLAIN_FAMILIES
from tests.renderers.reasoning_families import DEEPSEEK_TEMPLATE, HARMONY_TEMPLATE
from tests.renderers.synthetic import HYBRID_TEMPLATE, INSTRUCT_TEMPLATE, template_tokens
from tests.renderers.test_hosted_templates import KIMI_TEMPLATE, OPTIONS
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.renderers.gpt_oss import CONVERSATION_DATE

Template = tuple[str, dict[str, Any]]
TEMPLATES: dict[str, Template] = {
    **OPTIONS,
    "llama3": (PLAIN_FAMILIES["llama3"].template, {}),
    "qwen3": (HYBRID_TEMPLATE, {}),
    "qwen3_disable_thinking": (HYBRID_TEMPLATE, {"enable_thinking": False}),
    "qwen3_instruct": (INSTRUCT_TEMPLATE, {}),
    "deepseekv3": (DEEPSEEK_TEMPLATE, {"thinking": False}),
    "deepseekv3_disable_thinking": (DEEPSEEK_TEMPLATE, {"thinking": False}),
    "deepseekv3_thinking": (DEEPSEEK_TEMPLATE, {"thinking": True}),
    "gpt_oss_no_sysprompt": (HARMONY_TEMPLATE, {}),
    **{
        f"gpt_oss_{effort}_reasoning": (
            HARMONY_TEMPLATE,
            {"reasoning_effort": effort, "current_date": CONVERSATION_DATE},
        )
        for effort in ("low", "medium", "high")
    },
}
FAMILY_OF = {renderer: family for family, what in FAMILIES.items() for renderer in what.renderers}
WITH_JSON_ARGUMENTS = (KIMI_TEMPLATE, DEEPSEEK_TEMPLATE, HARMONY_TEMPLATE)
"""Templates that write a call's arguments as they were given."""


@cache
def counts(name: str) -> tuple[int, int, int]:
    """Prompts that equal the template: ours, the reference package's; and of how many."""
    family = FAMILY_OF[name]
    recorded, ours = observations(family, name)
    renderer, here, there, written = get_renderer(name, family_tokenizer(family)), 0, 0, 0
    for conversation in conversations_of(FAMILIES[family]):
        if conversation == "forged turn":
            continue
        try:
            wanted = template_prompt(name, renderer, conversation)
        except (TemplateError, TypeError):
            continue  # the template cannot write it
        written += 1
        here += ours[f"prompt: {conversation}"] == wanted
        there += recorded[f"prompt: {conversation}"] == wanted
    return here, there, written


def template_prompt(name: str, renderer: Renderer, conversation: str) -> str:
    """What the template of a renderer makes of a conversation, in the form of the recordings."""
    text, options = TEMPLATES[name]
    found: list[dict[str, Any]] = []
    for message in cases.CONVERSATIONS[conversation][:-1]:
        calls = {"tool_calls": [tool_call(*call) for call in message["tool_calls"]]} if "tool_calls" in message else {}
        as_openai: Any = renderer.to_openai_message({**message, **calls})  # pyright: ignore[reportArgumentType]
        for call in as_openai.get("tool_calls", []) if text not in WITH_JSON_ARGUMENTS else []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found.append(as_openai)
    tokenizer: Any = renderer.tokenizer
    ids = template_tokens(tokenizer, found, prompt=True, chat_template=text, **options)
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_many_prompts_as_there_equal_the_template(name: str) -> None:
    here, there, written = counts(name)
    assert here >= there, f"{name}: {here} of {written} here, {there} there"
    assert here > written / 2


def total() -> str:
    """The sentence of docs/renderers.md."""
    here, there, written = (sum(counts(name)[i] for name in TEMPLATES) for i in range(3))
    return f"{here:,} of {written:,} prompts here and {there:,} there"


def test_the_page_has_the_sum() -> None:
    assert total() in (ROOT / "docs" / "renderers.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    for each in TEMPLATES:
        print(each, *counts(each))
    print(total())
