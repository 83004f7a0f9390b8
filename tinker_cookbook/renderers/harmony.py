"""Harmony framing: a response taken apart at its special tokens, without knowing what its parts mean for a chat.

    <|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>

A response is a row of Harmony messages, each a header, <|message|>, a body and an end token. The prompt supplies the
`<|start|>assistant` of the first. Frames are cut at token ids, so text that merely looks like a token is text.
"""

import re
from dataclasses import dataclass

from tinker_cookbook.renderers.decoding import decode_tokens, encode_text, special_token_id
from tinker_cookbook.tokenizer_utils import Tokenizer

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
SPECIAL = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
STOPS = (RETURN, CALL)

# The recipient may stand with the role or with the channel; a content type may follow, with or without <|constrain|>.
_HEADER = re.compile(
    rf"(?P<role>\w*)(?: to=(?P<to>[^\s<]+))?"
    rf"(?:{re.escape(CHANNEL)}(?P<channel>\w+)(?: to=(?P<also_to>[^\s<]+))? ?(?:{re.escape(CONSTRAIN)})?(?P<type>\w*)\s*)?"
)
_INSIDE_SPECIAL = re.compile(f"(?<=<\\|)(?={'|'.join(re.escape(token[2:]) for token in SPECIAL)})")


@dataclass(frozen=True)
class Frame:
    """One Harmony message of a response.

    ending: the special token that ends it; "" where the response was cut off.
    text: all of it as written, from its header to its ending, without `<|start|>assistant`.
    well_formed: its header can be read and names the assistant, or nobody.
    """

    channel: str
    recipient: str
    body: str
    ending: str
    text: str
    well_formed: bool


class HarmonyFraming:
    """Special tokens of the format for one tokenizer, and how a response divides into its messages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids = {token: special_token_id(tokenizer, token) for token in SPECIAL}
        self._names = {token_id: token for token, token_id in self.ids.items()}

    def encode_body(self, text: str) -> list[int]:
        """Token ids of text in which nothing is special: a special token that it spells stays a row of plain ones."""
        # No token of plain text spans `<|` and the letters after it, so the cut changes nothing else.
        return [token for piece in _INSIDE_SPECIAL.split(text) for token in encode_text(self._tokenizer, piece)]

    def split(self, response: list[int]) -> tuple[list[Frame], bool]:
        """(messages up to the first stop, whether the response is one whole row of well-formed messages and no more)."""
        frames: list[Frame] = []
        start = 0
        while True:
            frame, end = self._read(response, start, first=not frames)
            frames.append(frame)
            if not frame.well_formed or frame.ending != END:
                return frames, frame.well_formed and frame.ending in STOPS and end == len(response)
            if end == len(response) or self._names.get(response[end]) != START:
                return frames, False
            start = end + 1

    def _read(self, response: list[int], start: int, first: bool) -> tuple[Frame, int]:
        """The message whose header begins at `start`, and where it ends."""
        at_body = self._find(response, start, (MESSAGE, START, END, *STOPS))
        header = decode_tokens(self._tokenizer, response[start:at_body])
        begins = at_body < len(response) and self._names[response[at_body]] == MESSAGE
        at_end = self._find(response, at_body + 1, SPECIAL) if begins else at_body
        token = self._names[response[at_end]] if at_end < len(response) else ""
        ending = token if token in (END, *STOPS) else ""
        end = at_end + 1 if ending else at_end
        body = decode_tokens(self._tokenizer, response[at_body + 1 : at_end]) if begins else ""
        # The prompt names the role of the first message only.
        match = _HEADER.fullmatch(f"assistant{header}" if first else header)
        well_formed = begins and token in ("", END, *STOPS) and match is not None and match["role"] == "assistant"
        written = decode_tokens(self._tokenizer, response[start:end])
        frame = Frame(
            channel=(match["channel"] or "") if match else "",
            recipient=(match["to"] or match["also_to"] or "") if match else "",
            body=body,
            ending=ending,
            text=written if first else written.removeprefix("assistant"),
            well_formed=well_formed,
        )
        return frame, end

    def _find(self, response: list[int], start: int, tokens: tuple[str, ...]) -> int:
        return next((i for i in range(start, len(response)) if self._names.get(response[i]) in tokens), len(response))
