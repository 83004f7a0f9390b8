"""Runs one public recipe in a process of its own: python -m tests.ecosystem.launch PACKAGE_FOLDER MODULE key=value ..."""

import sys

import tinker_cookbook
from tests.ecosystem import stubs
from tinker_local_backend import run

if __name__ == "__main__":
    package, module, *arguments = sys.argv[1:]
    # At the end: only what this library does not have is looked for there, and nothing but the recipes was unpacked.
    tinker_cookbook.__path__.append(package)
    stubs.install()
    run.main(["-m", f"tinker_cookbook.recipes.{module}", *arguments])
