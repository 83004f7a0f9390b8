"""Carry the project's missing requirements to a machine without a network, such as a GPU image that has torch but not chz.

    python -m tools.wheels list                                   here: show what would be downloaded, with sizes
    python -m tools.wheels download wheels --have have.txt        here: download it into the folder `wheels`
    python -m tools.wheels install wheels --target site           there: unpack, check, print the line to use

`have.txt` lists the target's packages: the output of `python -m pip list --format=freeze` there. The project itself is used from
its checkout. Exits with 1 if something is missing, and prints the fix.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pip._vendor.packaging.utils import canonicalize_name

from tinker_local_backend.command import check_command
from tools.wheels import folder, needs
from tools.wheels.needs import Package, Target, WheelsError

ROOT = Path(__file__).resolve().parents[2]
# Packages that no training image has: imported once after the installation, as a check.
IMPORTED = ("chz", "tinker", "datasets")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run a command for the checkout at `root`. Returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.verb == "install":
            return _install(root, options.folder, options.target)
        target = Target(options.python, options.platform)
        return _download(
            root, target, options.have, options.extra, options.folder if options.verb == "download" else None
        )
    except WheelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="show what download would write, with sizes")
    download = verbs.add_parser("download", help="write the wheels and their manifest into a folder")
    for verb in (listing, download):
        verb.add_argument("--python", default="3.12", help="Python version of the target (3.12)")
        verb.add_argument(
            "--platform",
            default="manylinux_2_28_x86_64",
            help="newest wheel tag that the target accepts; older glibc versions are included (manylinux_2_28_x86_64)",
        )
        verb.add_argument(
            "--have",
            type=Path,
            help="file of `name==version` or `name` lines: the target's packages (default: torch, transformers, peft, numpy, "
            "safetensors, pandas, pyarrow, pytest, hypothesis and their requirements)",
        )
        verb.add_argument(
            "--extra", action="append", default=[], help="extra of pyproject.toml to include; may be repeated"
        )
    install = verbs.add_parser("install", help="on the target: install a folder of wheels and check the result")
    download.add_argument("folder", type=Path, help="folder to write or replace")
    install.add_argument("folder", type=Path, help="folder that download wrote")
    install.add_argument("--target", type=Path, required=True, help="folder for PYTHONPATH; written or replaced")
    return parser


def _download(root: Path, target: Target, have_file: Path | None, extras: Sequence[str], dest: Path | None) -> int:
    """Show the packages that the target needs and, with `dest`, write them there."""
    requirements = needs.project_requirements(root, extras, target.python)
    preferred = needs.parse_constraints((root / "constraints.txt").read_text(encoding="utf-8"))
    if have_file is None:
        have = needs.parse_have("\n".join(needs.COMMON_IMAGE.split()), "the default list")
    elif have_file.is_file():
        have = needs.parse_have(have_file.read_text(encoding="utf-8"), str(have_file))
    else:
        raise WheelsError(f"--have {have_file}: no such file; write it there with `python -m pip list --format=freeze`")
    with tempfile.TemporaryDirectory() as cache:
        index = folder.Index(target, Path(cache))
        packages = needs.needed(requirements, have, preferred, target.markers(), index.find)
        wheels = [package for package in packages.values() if isinstance(package, folder.Wheel)]
        for wheel in wheels:
            note = f"  instead of the target's {have[wheel.name]}" if wheel.name in have else ""
            print(f"{wheel.name:24} {wheel.version:12} {wheel.path.stat().st_size / 1e6:7.2f} MB{note}")
        size = sum(wheel.path.stat().st_size for wheel in wheels)
        print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB, for Python {target.python} on {target.platform}")
        if dest is not None:
            folder.write_folder(dest, wheels, target, extras)
            print(f"Written to {dest}. Copy it to the target, next to this checkout, and run in the checkout:")
            print(f"  python -m tools.wheels install {dest} --target site")
    return 0


def _install(root: Path, wheels: Path, target: Path) -> int:
    """Install, then report what is still missing: by requirements, and by importing."""
    manifest = folder.read_folder(wheels)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest.python != running:
        raise WheelsError(
            f"the wheels of {wheels} are for Python {manifest.python}, and this is {running} ({sys.executable}): run this with "
            f"python{manifest.python}, or download again with --python {running}"
        )
    folder.install_folder(wheels, manifest, target)
    target = target.absolute()
    requirements = needs.project_requirements(root, manifest.extras, running)
    carried = {entry.name for entry in manifest.wheels}
    here = Target(manifest.python, manifest.platform)
    problems = [str(need) for need in needs.unmet(requirements, _installed(target), carried, here.markers())]
    problems += _imported(target)
    print(f"{len(manifest.wheels)} packages installed in {target}. Before you run the project:")
    print(f"  export PYTHONPATH={os.pathsep.join([str(target), str(root)])}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _installed(target: Path) -> dict[str, Package]:
    """The installed packages with `target` first on the path, by canonical name."""
    packages: dict[str, Package] = {}
    for dist in importlib.metadata.distributions(path=[str(target), *sys.path]):
        name = canonicalize_name(dist.metadata["Name"])
        packages.setdefault(name, Package(name, dist.version, tuple(dist.requires or ())))
    return packages


def _imported(target: Path) -> list[str]:
    """A message for each of `IMPORTED` that fails to import in a new Python process with `target` first on the path."""
    path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    problems: list[str] = []
    for name in IMPORTED:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            problems.append(f"`import {name}` fails with {target} on the path: {last}")
    return problems


if __name__ == "__main__":
    check_command()
    sys.exit(main())
