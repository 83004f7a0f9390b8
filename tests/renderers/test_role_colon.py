"""The base-model format: its exact text, its stop string, and the three ways in which a response ends."""

import pytest

from tests.renderers.synthetic import make_tokenizer
from tinker_cookbook.renderers import Message, ParseTermination, Renderer, TrainOnWhat, get_renderer

MESSAGES = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="Hi"),
    Message(role="assistant", content="Hello"),
]


def role_colon() -> Renderer:
    return get_renderer("role_colon", make_tokenizer())


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special_tokens=False)


def test_text() -> None:
    prompt = role_colon().build_generation_prompt(MESSAGES[:2])
    assert make_tokenizer().decode(prompt.to_ints()) == "System: Be brief.\n\nUser: Hi\n\nAssistant:"
    assert role_colon().get_stop_sequences() == ["\n\nUser:"]


def test_the_whole_stop_sequence_is_trained_at_the_end() -> None:
    model_input, weights = role_colon().build_supervised_example(MESSAGES)
    trained = [token for token, weight in zip(model_input.to_ints(), weights.tolist(), strict=True) if weight]
    assert make_tokenizer().decode(trained) == " Hello\n\nUser:"
    two_turns = [*MESSAGES, Message(role="user", content="Bye"), Message(role="assistant", content="Ciao")]
    ((model_input, weights),) = role_colon().build_supervised_examples(two_turns, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    trained = [token for token, weight in zip(model_input.to_ints(), weights.tolist(), strict=True) if weight]
    assert make_tokenizer().decode(trained) == " Hello\n\nUser: Ciao\n\nUser:"


@pytest.mark.parametrize(
    ("response", "content", "termination"),
    [
        (" Hello\n\nUser:", "Hello", ParseTermination.STOP_SEQUENCE),
        (" Hello<|im_end|>", "Hello", ParseTermination.EOS),
        (" Hello", "Hello", ParseTermination.MALFORMED),
        ("  a \n\nUser:", " a ", ParseTermination.STOP_SEQUENCE),
        (" Hello\n\nUser: more", "Hello", ParseTermination.MALFORMED),
        ("", "", ParseTermination.MALFORMED),
    ],
)
def test_endings(response: str, content: str, termination: ParseTermination) -> None:
    assert role_colon().parse_response(ids(response)) == (Message(role="assistant", content=content), termination)


def test_a_beginning_of_text_token_comes_first_where_the_tokenizer_has_one() -> None:
    tokenizer = make_tokenizer(markers=("<|endoftext|>", "<s>", "<|im_end|>"))
    tokenizer.bos_token = "<s>"
    prompt = get_renderer("role_colon", tokenizer).build_generation_prompt(MESSAGES[1:2])
    assert prompt.to_ints()[0] == tokenizer.bos_token_id
    assert tokenizer.decode(prompt.to_ints()) == "<s>User: Hi\n\nAssistant:"
