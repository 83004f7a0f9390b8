"""Runs one public program in a process of its own: python -m tests.ecosystem.launch LIBRARY FOLDER PROGRAM key=value ...

LIBRARY: `this`, with the recipes of `FOLDER` behind it, or `theirs`, the tinker_cookbook in `FOLDER`: then nothing of this
project but the engine is imported. PROGRAM: a module, or the path of a script.
"""

import sys
from pathlib import Path

from tests.ecosystem import stubs
from tinker_local_backend import run

if __name__ == "__main__":
    library, folder, program, *arguments = sys.argv[1:]
    if library == "theirs":
        assert "tinker_cookbook" not in sys.modules, "the engine knows nothing of the library"
        sys.path.insert(0, folder)
    else:
        import tinker_cookbook

        # At the end: only what this library does not have is looked for there, and nothing but the recipes was unpacked.
        tinker_cookbook.__path__.append(str(Path(folder, "tinker_cookbook")))
    stubs.install()
    run.main([*([] if program.endswith(".py") else ["-m"]), program, *arguments])
