"""Which tokens carry weight, spelled out: the trained text of one conversation under each selection."""

import pytest
import torch

from tests.renderers.synthetic import make_tokenizer
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Message, Renderer, TextPart, ThinkingPart, TrainOnWhat, get_renderer
from tinker_cookbook.renderers.qwen3 import Qwen3InstructRenderer
from tinker_cookbook.renderers.renderer import RenderContext, RenderedMessage, text_chunk

CONVERSATION = [
    Message(role="system", content="S"),
    Message(role="user", content="U1"),
    Message(role="assistant", content="A1"),
    Message(role="user", content="U2"),
    Message(role="assistant", content="A2"),
    Message(role="tool", content="T"),
    Message(role="assistant", content="A3"),
]


def trained_text(renderer: Renderer, messages: list[Message], train_on_what: TrainOnWhat) -> list[str]:
    """The runs of weight 1, as text."""
    model_input, weights = renderer.build_supervised_example(messages, train_on_what)
    assert set(weights.tolist()) <= {0.0, 1.0}
    runs: list[list[int]] = []
    previous = 0.0
    for token, weight in zip(model_input.to_ints(), weights.tolist(), strict=True):
        if weight and not previous:
            runs.append([])
        if weight:
            runs[-1].append(token)
        previous = weight
    return [str(make_tokenizer().decode(run)) for run in runs]


def instruct() -> Renderer:
    return get_renderer("qwen3_instruct", make_tokenizer())


@pytest.mark.parametrize(
    ("train_on_what", "expected"),
    [
        (TrainOnWhat.LAST_ASSISTANT_MESSAGE, ["A3<|im_end|>"]),
        (TrainOnWhat.LAST_ASSISTANT_TURN, ["A2<|im_end|>", "A3<|im_end|>"]),
        (TrainOnWhat.ALL_ASSISTANT_MESSAGES, ["A1<|im_end|>", "A2<|im_end|>", "A3<|im_end|>"]),
        (TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES, ["\nS<|im_end|>", "\nU1<|im_end|>", "\nU2<|im_end|>"]),
        (
            TrainOnWhat.ALL_MESSAGES,
            [
                "\nS<|im_end|>",
                "\nU1<|im_end|>",
                "A1<|im_end|>",
                "\nU2<|im_end|>",
                "A2<|im_end|>",
                "\n<tool_response>\nT\n</tool_response><|im_end|>",
                "A3<|im_end|>",
            ],
        ),
    ],
)
def test_selection(train_on_what: TrainOnWhat, expected: list[str]) -> None:
    assert trained_text(instruct(), CONVERSATION, train_on_what) == expected


def test_all_tokens_leaves_none_out() -> None:
    _, weights = instruct().build_supervised_example(CONVERSATION, TrainOnWhat.ALL_TOKENS)
    assert bool((weights == 1).all())


def test_customized_follows_the_key() -> None:
    messages = [
        Message(role=m["role"], content=m["content"], trainable=i in (1, 4)) for i, m in enumerate(CONVERSATION)
    ]
    assert trained_text(instruct(), messages, TrainOnWhat.CUSTOMIZED) == ["\nU1<|im_end|>", "A2<|im_end|>"]


def test_trainable_key_is_required_for_customized_and_forbidden_otherwise() -> None:
    with pytest.raises(RendererError, match=r"message 0 \(system\) lacks the key 'trainable'.*required on every"):
        instruct().build_supervised_example(CONVERSATION, TrainOnWhat.CUSTOMIZED)
    with_key = [*CONVERSATION[:-1], Message(role="assistant", content="A3", trainable=False)]
    for build in (instruct().build_supervised_example, instruct().build_supervised_examples):
        with pytest.raises(RendererError, match=r"message 6 \(assistant\) has the key 'trainable'"):
            build(with_key, TrainOnWhat.LAST_ASSISTANT_TURN)


@pytest.mark.parametrize("train_on_what", [TrainOnWhat.LAST_ASSISTANT_MESSAGE, TrainOnWhat.ALL_ASSISTANT_MESSAGES])
def test_nothing_selected_is_an_error(train_on_what: TrainOnWhat) -> None:
    with pytest.raises(RendererError, match="selects nothing in a conversation with roles"):
        instruct().build_supervised_example(CONVERSATION[:2], train_on_what)
    with pytest.raises(RendererError, match="selects nothing"):
        instruct().build_supervised_examples([], train_on_what)


def test_the_supplied_think_block_is_not_trained() -> None:
    renderer = get_renderer("qwen3_disable_thinking", make_tokenizer())
    assert trained_text(renderer, CONVERSATION[:3], TrainOnWhat.ALL_ASSISTANT_MESSAGES) == ["A1<|im_end|>"]
    thinking = get_renderer("qwen3", make_tokenizer())
    block = "<think>\n\n</think>\n\nA1<|im_end|>"
    assert trained_text(thinking, CONVERSATION[:3], TrainOnWhat.ALL_ASSISTANT_MESSAGES) == [block]


def test_output_that_the_prompt_supplies_is_not_trained() -> None:
    """A format may write in its output what its prompt prefills; that part keeps weight 0."""

    class Prefilled(Qwen3InstructRenderer):
        def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
            if message["role"] == "assistant" and message["content"] != "":
                message = Message(role="assistant", content=f"<think>{message['content']}")
            return super().render_message(message, ctx)

        def _get_generation_suffix(self, role: str, ctx: RenderContext) -> list[int]:
            think = self.tokenizer.encode("<think>", add_special_tokens=False)
            return super()._get_generation_suffix(role, ctx) + think

    assert trained_text(Prefilled(make_tokenizer()), CONVERSATION[:3], TrainOnWhat.LAST_ASSISTANT_MESSAGE) == [
        "A1<|im_end|>"
    ]


def test_examples_split_where_history_loses_its_thinking() -> None:
    def answer(thinking: str, text: str) -> Message:
        return Message(
            role="assistant",
            content=[ThinkingPart(type="thinking", thinking=thinking), TextPart(type="text", text=text)],
        )

    messages = [
        Message(role="user", content="U1"),
        answer("t1", "A1"),
        Message(role="user", content="U2"),
        answer("t2", "A2"),
        Message(role="tool", content="T"),
        answer("t3", "A3"),
    ]
    renderer = get_renderer("qwen3", make_tokenizer())
    examples = renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    texts = [str(make_tokenizer().decode(model_input.to_ints())) for model_input, _ in examples]
    # The last two answers share a turn: one example, with the first question's thinking gone.
    assert [[f"t{i}" in text for i in (1, 2, 3)] for text in texts] == [[True, False, False], [False, True, True]]
    trained = make_tokenizer().encode("<think>\nt2\n</think>\n\nA2<|im_end|>", add_special_tokens=False)
    trained += make_tokenizer().encode("<think>\nt3\n</think>\n\nA3<|im_end|>", add_special_tokens=False)
    model_input, weights = examples[1]
    assert torch.tensor(model_input.to_ints())[weights > 0].tolist() == trained
    (only,) = renderer.build_supervised_examples(messages)
    assert only[0].to_ints() == model_input.to_ints()


def test_empty_chunks_do_not_exist() -> None:
    assert text_chunk([]) is None
    for name in ("role_colon", "qwen3", "qwen3_instruct"):
        prompt = get_renderer(name, make_tokenizer()).build_generation_prompt([], prefill="")
        assert [chunk.length > 0 for chunk in prompt.chunks] == [True]
