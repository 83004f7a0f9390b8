"""Gemma's own rules: turns alternate, and the system message opens the first of them."""

import pytest

from tests.renderers.families import family_tokenizer, make, reference
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Message, Role


def said(*roles: Role) -> list[Message]:
    return [Message(role=role, content="x") for role in roles]


@pytest.mark.parametrize(
    ("roles", "error"),
    [
        (("assistant",), "message 0: role 'assistant' cannot follow 'nothing'"),
        (("system", "assistant"), "message 1: role 'assistant' cannot follow 'system'"),
        (("user", "user"), "message 1: role 'user' cannot follow 'user'"),
        (("user", "assistant", "assistant"), "message 2: role 'assistant' cannot follow 'assistant'"),
        (("user", "system"), "message 1: role 'system' cannot follow 'user'"),
        (("user", "tool"), "message 1: role 'user' cannot follow 'user'"),
    ],
)
def test_turns_alternate(roles: tuple[Role, ...], error: str) -> None:
    with pytest.raises(RendererError, match=error):
        make("gemma").build_generation_prompt(said(*roles))


def test_a_prompt_cannot_leave_the_system_message_alone() -> None:
    with pytest.raises(RendererError, match=r"ends with the system message.*add a user message"):
        make("gemma").build_generation_prompt(said("system"))
    with pytest.raises(RendererError, match="role='system' cannot be asked to speak"):
        make("gemma").build_generation_prompt([], role="system")
    prompt = make("gemma").build_generation_prompt(said("system"), role="user")
    assert family_tokenizer("gemma").decode(prompt.to_ints()) == "<bos><start_of_turn>user\nx\n\n"


def test_white_space_around_a_question_goes_and_around_the_system_message_stays() -> None:
    messages = [Message(role="system", content="\n S \n"), Message(role="user", content="\n U \n")]
    prompt = make("gemma").build_generation_prompt(messages)
    assert family_tokenizer("gemma").decode(prompt.to_ints()) == (
        "<bos><start_of_turn>user\n\n S \n\n\nU<end_of_turn>\n<start_of_turn>model\n"
    )
    assert prompt.to_ints() == reference("gemma", messages, prompt=True)
