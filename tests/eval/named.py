"""What tests of benchmarks by name share: a renderer, a row, a file of rows."""

import json
from pathlib import Path
from typing import Any

from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

TINY = str(EXAMPLE_DATA / "tiny_chat")
TOKENIZER = get_tokenizer(TINY)
RENDERER = get_renderer("qwen3_instruct", TOKENIZER, model_name=TINY)

IFEVAL = {
    "key": 1000,
    "prompt": "Write without commas, in three words at least.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [
        {"num_words": None, "relation": None},
        {"num_words": 3, "relation": "at least"},
    ],
}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
