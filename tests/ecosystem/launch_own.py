"""Runs one recipe on the library that it comes with: python -m tests.ecosystem.launch_own FOLDER MODULE key=value ...

`FOLDER` holds the whole package; nothing of this library but the engine is imported.
"""

import sys

from tests.ecosystem import stubs
from tinker_local_backend import run

if __name__ == "__main__":
    folder, module, *arguments = sys.argv[1:]
    assert "tinker_cookbook" not in sys.modules, "the engine knows nothing of the library"
    sys.path.insert(0, folder)
    stubs.install()
    run.main(["-m", f"tinker_cookbook.recipes.{module}", *arguments])
