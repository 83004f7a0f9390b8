"""Pages as scripts: what a reader pastes, block after block, in a folder outside the repository.

The language of a fenced block says what becomes of it:

    bash     is pasted into a shell
    python   is pasted into one session for the whole page; after a paragraph that ends in "into `FILE`:" it is that file
    json     is the file that such a paragraph names; toml too
    text     is what the block before it printed: numbers may be others, and `...` stands for anything. A line that begins
             with "error:" means that the command fails
    sh       holds commands for weights, data or a service that are not at hand: only their keys are looked at
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[1]
LANGUAGES = ("bash", "python", "json", "toml", "text", "sh")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"\binto `([\w./]+)`[^`]*:$")
_NUMBER = re.compile(r"[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?")
_RULE = re.compile("[─━]+")
_HEADER = str.maketrans("┃", "│")


class Block(NamedTuple):
    """A fenced block of a page."""

    place: str
    language: str
    text: str
    file: str | None
    """the file that it is, if it is one"""


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        paragraph = text[: match.start()].rstrip().rpartition("\n\n")[2]
        file = _FILE.search(" ".join(paragraph.split()))
        place = f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}"
        found.append(Block(place, match[1], match[2], file[1] if file else None))
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each `python -m ...` of a bash or sh block, without what stands before it and behind a pipe."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if re.match(r"(.*\| *)?([A-Z_]+=\S+ )*python -m ", line):
            words = shlex.split(line[line.index("python -m ") :], comments=True)
            ends = [i for i, word in enumerate(words) if word in ("|", "&&", ">", ";")]
            yield words[: ends[0]] if ends else words


def spoken_of(page: Path) -> Iterator[list[str]]:
    """The words of each recipe's command outside the blocks, indented or in a line of text; dots stand for nothing."""
    text = _FENCE.sub("", page.read_text())
    for command in re.findall(r"(?:`|^ {4})(python -m recipes\.(?!NAME)\w[^`\n]*)", text, re.MULTILINE):
        yield [word for word in shlex.split(command, comments=True) if "..." not in word]


class Reader:
    """Somebody who pastes a page's blocks: with a folder, a shell, and a Python session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "130", "HF_HUB_OFFLINE": "1"}
        places = {"HOME": folder, "TINKER_LOCAL_HOME": folder / "home", "TINKER_COOKBOOK_RUNS_DIR": folder / "all_runs"}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TINKER_")}
        self.environment = inherited | own | {key: str(place) for key, place in places.items()} | {"PATH": path}

    def read(self, page: Path) -> None:
        """Paste every block. Raises AssertionError for one that fails, or prints what the page does not say."""
        printed, pasted = "", blocks(page)
        for block, following in zip(pasted, [*pasted[1:], None], strict=True):
            assert block.language in LANGUAGES, f"{block.place}: {block.language!r} is none of {LANGUAGES}"
            if block.language == "text":
                assert agree(block.text, printed), f"{block.place}: what was printed is\n{printed}"
                continue
            shown = following.text if following is not None and following.language == "text" else ""
            printed = self.paste(block, fails=re.search("^error:", shown, re.MULTILINE) is not None)

    def paste(self, block: Block, fails: bool = False) -> str:
        """What a block prints. `fails`: the reader is told that it does."""
        if block.file is not None:
            (self.folder / block.file).parent.mkdir(exist_ok=True)
            (self.folder / block.file).write_text(block.text)
        elif block.language == "python":
            return self.run_python(block)
        elif block.language == "bash":
            return self.run_shell(block, fails)
        return ""

    def run_python(self, block: Block) -> str:
        printed = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
            exec(compile(block.text, block.place, "exec"), self.names)
        return printed.getvalue()

    def run_shell(self, block: Block, fails: bool) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=2 * HANG_SECONDS,
        )
        assert (done.returncode != 0) == fails, f"{block.place}: exit code {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout


@contextlib.contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """What is imported from `folder` within the body is forgotten after it."""
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            if (file := getattr(module, "__file__", None)) and Path(file).absolute().is_relative_to(folder):
                del sys.modules[name]


def agree(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, but for numbers and the width of tables."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(_plain(shown), _plain(printed), flags)


def _plain(text: str) -> str:
    return _RULE.sub("─", _NUMBER.sub("0", text.translate(_HEADER)))
