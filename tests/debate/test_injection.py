"""Between a debater's turns stand its own ids, the template's, and the opponent's ids as they were sampled."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.debate.arena import ITEM as QUESTION
from tests.debate.arena import RENDERERS, decode, encode, make_protocol, make_renderer, reply_ids, stop_ids
from tests.debate.arena import first_prompt as first_prompt_of
from tests.drawn import examples
from tests.renderers import synthetic
from tests.renderers.test_all_families import ENTRIES
from tinker_cookbook.debate.injection import TurnInjection, make_injection, opening_prompt, repeated
from tinker_cookbook.debate.prompts import CLOSING, CONFIDENCE_REQUEST, OPPONENT, REBUTTAL, DebatePrompts
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.renderers import Message, Renderer, get_renderer

TEMPLATES = {"rebuttal": REBUTTAL, "closing": CLOSING}
# Text of any kind, short of what would itself end a turn or be a special token.
speeches = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>:\r\n"), min_size=1, max_size=12)


@pytest.fixture(params=RENDERERS)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return make_renderer(request.param)


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    return TEMPLATES[request.param]


def first_prompt(renderer: Renderer) -> list[int]:
    return first_prompt_of(make_protocol(renderer).dialogue)


def rendered(renderer: Renderer, own: str, user: str) -> list[int]:
    """The prompt that the renderer itself would build of the same conversation, had it been text."""
    task_messages = make_protocol(renderer).task.messages(QUESTION, CONFIDENCE_REQUEST)
    turns: list[Message] = [{"role": "assistant", "content": own}, {"role": "user", "content": user}]
    return renderer.build_generation_prompt([*task_messages, *turns]).to_ints()


def lead(renderer: Renderer) -> str:
    """role_colon's replies begin with the space after `Assistant:`."""
    return " " if renderer.get_stop_sequences() == ["\n\nUser:"] else ""


def test_next_prompt_is_prompt_own_reply_injected_opponent_suffix(renderer: Renderer, template: str) -> None:
    injection, prompt = make_injection(renderer, template), first_prompt(renderer)
    own, opponent = reply_ids(renderer, "I say 12"), reply_ids(renderer, "I say 9")
    following = injection.next_prompt(renderer, prompt, own, opponent)
    without_stop = opponent[: -len(stop_ids(renderer))]
    assert following == [*prompt, *own, *injection.after_stop, *without_stop, *injection.suffixes[0]]
    before, after = template.split(OPPONENT)
    assert before in decode(renderer, injection.after_stop) and after in decode(renderer, injection.suffixes[0])


def test_equals_the_renderer_for_text_that_round_trips(renderer: Renderer, template: str) -> None:
    own, opponent = lead(renderer) + "I say 12", lead(renderer) + "I say 9"
    following = make_injection(renderer, template).next_prompt(
        renderer, first_prompt(renderer), reply_ids(renderer, own), reply_ids(renderer, opponent)
    )
    assert following == rendered(renderer, own.lstrip(), template.replace(OPPONENT, opponent))


@pytest.mark.parametrize("name", RENDERERS)
@examples(40)
@given(own=speeches, opponent=speeches)
def test_reads_like_the_renderer_for_any_text(name: str, own: str, opponent: str) -> None:
    renderer = make_renderer(name)
    following = make_injection(renderer, REBUTTAL).next_prompt(
        renderer, first_prompt(renderer), reply_ids(renderer, lead(renderer) + own), reply_ids(renderer, opponent)
    )
    expected = rendered(renderer, own, REBUTTAL.replace(OPPONENT, opponent))
    assert decode(renderer, following) == decode(renderer, expected)


def test_the_opponent_s_ids_are_never_encoded_again(renderer: Renderer) -> None:
    letter_by_letter = [token for letter in "twelve is right" for token in encode(renderer, letter)]
    assert letter_by_letter != encode(renderer, "twelve is right")
    injection = make_injection(renderer, REBUTTAL)
    own = letter_by_letter + stop_ids(renderer)
    following = injection.next_prompt(renderer, [1, 2], own, letter_by_letter + stop_ids(renderer))
    assert following == [1, 2, *own, *injection.after_stop, *letter_by_letter, *injection.suffixes[0]]


def test_a_truncated_reply_is_closed(renderer: Renderer, template: str) -> None:
    injection = make_injection(renderer, template)
    opponent = reply_ids(renderer, "I say 9")
    cut, ended = (reply_ids(renderer, "I say 12 becau", stopped) for stopped in (False, True))
    after_cut = injection.next_prompt(renderer, [1], cut, opponent)
    assert after_cut[: 1 + len(cut)] == [1, *cut]
    assert after_cut[1 + len(cut) : 1 + len(ended)] == stop_ids(renderer)
    assert after_cut == injection.next_prompt(renderer, [1], ended, opponent)


def test_the_opponent_s_stop_is_left_out_and_a_truncated_one_needs_none(renderer: Renderer) -> None:
    injection, own = make_injection(renderer, REBUTTAL), reply_ids(renderer, "I say 12")
    cut, ended = (reply_ids(renderer, "I say 9", stopped) for stopped in (False, True))
    following = injection.next_prompt(renderer, [1], own, ended)
    assert following == injection.next_prompt(renderer, [1], own, cut)
    stop = decode(renderer, stop_ids(renderer))
    own_end = 1 + len(own)
    template_stops = decode(renderer, [*injection.after_stop, *injection.suffixes[0]]).count(stop)
    assert decode(renderer, following[own_end:]).count(stop) == template_stops


def test_rounds_chain_so_that_each_prompt_extends_the_last(renderer: Renderer) -> None:
    prompt = first_prompt(renderer)
    for template in TEMPLATES.values():
        own = reply_ids(renderer, "mine")
        following = make_injection(renderer, template).next_prompt(renderer, prompt, own, reply_ids(renderer, "theirs"))
        assert following[: len(prompt) + len(own)] == prompt + own
        prompt = following


def test_no_placeholder_is_left(renderer: Renderer, template: str) -> None:
    injection = make_injection(renderer, template)
    text = decode(renderer, [*injection.after_stop, *injection.suffixes[0]])
    assert "reserved" not in text and OPPONENT not in text


def test_an_injection_is_a_plain_value(renderer: Renderer) -> None:
    assert make_injection(renderer, REBUTTAL) == make_injection(renderer, REBUTTAL)
    assert isinstance(make_injection(renderer, REBUTTAL), TurnInjection)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("field", ["rebuttal", "closing"])
def test_a_wording_holds_the_opponent_exactly_once(field: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"prompts.{field} must contain .* exactly once, found {count} times"):
        DebatePrompts(**{field: f"hear: {OPPONENT * count}"})


def test_a_tokenizer_without_spare_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="spare special tokens; a debate needs two"):
        make_injection(get_renderer("qwen3_instruct", synthetic.make_tokenizer()), REBUTTAL)


# Kimi-K3 closes the response and the message before its stop token, so its reply is more than text and stop: refused.
NESTED = "kimi_k31_pro_disable_thinking"
EXTENDING = sorted(name for name, entry in ENTRIES.items() if entry.extends and name != NESTED)


class TestEveryFamily:
    """Each renderer with the extension property carries a debate: what it is given next is, token for token, what it had,
    what it said, and what its own rendering of the conversation has in between."""

    def renderer(self, name: str) -> Renderer:
        tokenizer = copy.deepcopy(ENTRIES[name].tokenizer())
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|spare_0|>", "<|spare_1|>"]})
        return get_renderer(name, tokenizer)

    @pytest.mark.parametrize("name", EXTENDING)
    @pytest.mark.parametrize("heard", [1, 2])
    def test_by_content(self, name: str, heard: int) -> None:
        renderer = self.renderer(name)
        assert renderer.has_extension_property
        template = repeated("Others said:\n\n{opponent}\n\nReply.", [""] * heard)
        first: list[Message] = [{"role": "user", "content": "Which?"}]
        prompt = renderer.build_generation_prompt(first).to_ints()
        begins = "</think>" if decode(renderer, prompt).endswith("<think>") else lead(renderer)
        own, others = f"{begins}I say so", [f"I say {i}" for i in range(heard)]
        spoken = reply_ids(renderer, own)
        following = make_injection(renderer, template).next_prompt(
            renderer, prompt, spoken, *(reply_ids(renderer, other) for other in others)
        )
        assert following[: len(prompt) + len(spoken)] == prompt + spoken
        user = template
        for other in others:
            user = user.replace(OPPONENT, other, 1)
        turns: list[Message] = [{"role": "assistant", "content": "I say so"}, {"role": "user", "content": user}]
        assert decode(renderer, following) == decode(
            renderer, renderer.build_generation_prompt([*first, *turns]).to_ints()
        )
        for other in others:
            ids = encode(renderer, other)
            assert any(following[i : i + len(ids)] == ids for i in range(len(prompt) + len(spoken), len(following)))

    def test_a_format_that_closes_elements_before_its_stop_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="does not end an assistant turn with its stop sequence"):
            make_injection(self.renderer(NESTED), f"Hear: {OPPONENT}")

    def test_reasoning_that_a_renderer_sets_apart_is_one_s_own(self) -> None:
        renderer = self.renderer("kimi_k26_preserve_thinking")
        injection, own = make_injection(renderer, f"Hear: {OPPONENT}"), reply_ids(renderer, "</think>mine")
        thought, plain = (reply_ids(renderer, text) for text in ("secret</think>I say 13", "</think>I say 13"))
        following = injection.next_prompt(renderer, [1], own, thought)
        assert "secret" not in decode(renderer, following) and following == injection.next_prompt(
            renderer, [1], own, plain
        )

    @pytest.mark.parametrize("name", EXTENDING)
    def test_an_opening_that_shows_what_others_said(self, name: str) -> None:
        renderer, said = self.renderer(name), "I say 13"
        messages: list[Message] = [{"role": "user", "content": f"Which?\n\nThey said:\n\n{OPPONENT}\n\nReply."}]
        opening = opening_prompt(renderer, messages, [reply_ids(renderer, said)])
        expected = [{**messages[0], "content": str(messages[0]["content"]).replace(OPPONENT, said)}]
        assert decode(renderer, opening) == decode(renderer, renderer.build_generation_prompt(expected).to_ints())  # type: ignore[arg-type]
