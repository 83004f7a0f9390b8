"""The tokenizer: byte-level BPE learnt from the corpus, one token per digit, ChatML specials, no automatically added tokens.

Tags such as <SOLUTION> are kept in one piece by the splitting pattern, so that BPE can make each a single token.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD = "<|endoftext|>"
STOP = "<|im_end|>"
# Markup stays visible in text decoded with skip_special_tokens, as with the Qwen models.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTROL = (PAD, "<|im_start|>", STOP)
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(16))
SPECIALS = CONTROL + MARKUP + RESERVED
CONTEXT_LENGTH = 1024

SPLIT = r"</?\p{L}+>| ?\p{L}+|'\p{L}+|\p{N}| ?[^\s\p{L}\p{N}<]+|<|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- if tools %}{{ raise_exception("this chat template takes no tools: describe them in a system message") }}{% endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response><|im_end|>\\n" }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, split: str = SPLIT) -> PreTrainedTokenizerFast:
    """Learns the merges. `vocab_size` counts bytes, merges and specials. No merge crosses a match of `split`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((_without_specials(text) for text in texts), trainer)
    bpe.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    bpe.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKUP])
    bpe.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in RESERVED])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=STOP,
        additional_special_tokens=["<|im_start|>", *RESERVED],
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _without_specials(text: str) -> str:
    """The text without special tokens: learning merges inside them would waste vocabulary."""
    for special in SPECIALS:
        text = text.replace(special, "\n")
    return text


def token_id(tokenizer: PreTrainedTokenizerFast, special: str) -> int:
    number = tokenizer.convert_tokens_to_ids(special)
    if not isinstance(number, int):
        raise ValueError(f"special: {special!r} is not one token of this tokenizer")
    return number
