"""Resolve which packages, in which versions, a machine lacks; and which requirements are unmet on this machine.

There is no backtracking. A version comes from constraints.txt if it meets every requirement, else it is the newest that does;
requirements without a common version are an error. Markers are evaluated for the target, not for the running Python, and
`python_full_version` is assumed to be the first patch release ("3.12.0"), because the target's patch number is not known here.
"""

import re
import tomllib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# pip includes the packaging library, so this works even if nothing else is installed.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import InvalidVersion, Version

PROJECT = "pyproject.toml"
# Packages that belong to the machine's driver and image, of gigabytes: checked, never downloaded.
_NEVER_CARRIED = re.compile(r"torch|triton|(nvidia|cuda)-.*")
# Wheel tags from before tags stated the glibc version.
_OLD_TAGS = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}

# An image for training with PyTorch: torch, transformers, peft, numpy, safetensors, pandas, pyarrow, pytest, hypothesis and
# their own needs. typing-extensions is left out on purpose: pydantic wants a newer one than images tend to have.
COMMON_IMAGE = """
    accelerate annotated-doc anyio certifi click filelock fsspec h11 hf-xet httpcore httpx huggingface-hub hypothesis idna
    iniconfig jinja2 markdown-it-py markupsafe mdurl mpmath networkx numpy packaging pandas peft pip pluggy psutil pyarrow
    pygments pytest python-dateutil pyyaml regex rich safetensors setuptools shellingham six sortedcontainers sympy tokenizers
    torch tqdm transformers triton typer
"""


class WheelsError(Exception):
    """A problem, with its fix; shown without a traceback."""


@dataclass(frozen=True)
class Target:
    """The machine that the wheels are for.

    Args:
        python: its Python version, major and minor: "3.12".
        platform: the newest wheel tag that it accepts: "manylinux_2_28_x86_64" for glibc 2.28 or newer.

    Raises:
        WheelsError: a field does not have that form.
    """

    python: str
    platform: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"3\.\d+", self.python):
            raise WheelsError(f"--python {self.python!r}: write major and minor version, such as 3.12")
        if not re.fullmatch(r"manylinux_2_\d+_\w+", self.platform):
            raise WheelsError(
                f"--platform {self.platform!r}: write manylinux_2_<glibc>_<machine>, such as manylinux_2_28_x86_64; "
                "`ldd --version` on the target says which glibc it has"
            )

    @property
    def _parts(self) -> tuple[int, str]:
        glibc, machine = self.platform.removeprefix("manylinux_2_").split("_", 1)
        return int(glibc), machine

    def platforms(self) -> list[str]:
        """Every wheel tag that runs there, newest first. pip takes each `--platform` literally, so older ones are listed too."""
        glibc, machine = self._parts
        tags: list[str] = []
        for minor in range(glibc, 4, -1):
            tags.append(f"manylinux_2_{minor}_{machine}")
            if minor in _OLD_TAGS:
                tags.append(f"{_OLD_TAGS[minor]}_{machine}")
        return tags

    def markers(self) -> dict[str, str]:
        """The values of all environment markers on the target."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self._parts[1],
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


@dataclass(frozen=True)
class Package:
    """A package in one version, and its requirements (`Requires-Dist` lines)."""

    name: str
    version: str
    requires: tuple[str, ...] = ()


def parse_have(text: str, source: str) -> dict[str, str | None]:
    """Canonical names with versions, from `name==version` or `name` lines; None if a line names no version.

    Raises:
        WheelsError: a line is neither; the message names `source` and the line.
    """
    have: dict[str, str | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        name, _, version = (part.strip() for part in line.partition("=="))
        try:
            if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
                raise InvalidVersion(name)
            have[canonicalize_name(name)] = str(Version(version)) if version else None
        except InvalidVersion:
            raise WheelsError(
                f"{source}, line {number}: {line!r} is neither `name==version` nor `name`; "
                "`python -m pip list --format=freeze` writes such lines"
            ) from None
    return have


def parse_constraints(text: str) -> dict[str, str]:
    """Canonical names with the pinned versions of constraints.txt."""
    return {name: version for name, version in parse_have(text, "constraints.txt").items() if version}


def needed(
    roots: Iterable[str],
    have: Mapping[str, str | None],
    preferred: Mapping[str, str],
    markers: Mapping[str, str],
    find: Callable[[str, str], Package],
) -> dict[str, Package]:
    """The packages to carry, one version of each, so that `roots` and their requirements are met together with `have`.

    Args:
        roots: requirements of the project.
        have: the target's packages, by canonical name; a version of None meets every requirement.
        preferred: versions to use if they meet the requirements, by canonical name.
        markers: values of the environment markers on the target.
        find: (requirement such as "name==1.0", what needs it) -> the package in the newest version that meets it.

    Raises:
        WheelsError: a package is needed that is never carried (torch and its CUDA packages), or `find` raised it.
    """
    resolver = _Resolver(list(roots), have, preferred, markers, find)
    bounds: dict[str, SpecifierSet] = {}
    while True:
        chosen, clash = resolver.walk(bounds)
        if clash is None:
            return dict(sorted(chosen.items()))
        # The requirement was seen after the version was chosen: restart with it. Bounds only grow, so this ends.
        name = canonicalize_name(clash.name)
        bounds[name] = bounds.get(name, SpecifierSet()) & clash.specifier


@dataclass(frozen=True)
class _Resolver:
    """The arguments of `needed`."""

    roots: Sequence[str]
    have: Mapping[str, str | None]
    preferred: Mapping[str, str]
    markers: Mapping[str, str]
    find: Callable[[str, str], Package]

    def walk(self, bounds: Mapping[str, SpecifierSet]) -> tuple[dict[str, Package], Requirement | None]:
        """One pass over the requirements: the chosen packages, or a requirement that an already chosen version does not meet."""
        chosen: dict[str, Package] = {}
        specifiers = dict(bounds)
        queue = deque((requirement, PROJECT) for requirement in active(self.roots, self.markers))
        seen: set[tuple[str, str]] = set()
        while queue:
            requirement, by = queue.popleft()
            if (str(requirement), by) in seen:
                continue
            seen.add((str(requirement), by))
            name = canonicalize_name(requirement.name)
            specifier = specifiers[name] = specifiers.get(name, SpecifierSet()) & requirement.specifier
            if _clashes(requirement, chosen):
                return {}, requirement
            package = chosen.get(name)
            if package is None and name in self.have and fits(self.have[name], specifier):
                if not requirement.extras:
                    continue
                package = self._installed(name, by)
            elif package is None:
                try:
                    package = chosen[name] = self._choose(name, specifier, by)
                except WheelsError:
                    # It may be needed only by a version that a later requirement rules out.
                    clash = next((other for other, _ in queue if _clashes(other, chosen)), None)
                    if clash is None:
                        raise
                    return {}, clash
                queue.extend((need, _label(package)) for need in active(package.requires, self.markers))
            queue.extend(
                (need, _label(package)) for need in of_extras(package.requires, requirement.extras, self.markers)
            )
        return chosen, None

    def _choose(self, name: str, specifier: SpecifierSet, by: str) -> Package:
        if never_carried(name):
            installed = f"version {self.have[name]}" if name in self.have else "none"
            raise WheelsError(
                f"{by} needs {name}{specifier}, the target has {installed}, and {name} is never carried: use an image with it, "
                "and name it in the file given as --have"
            )
        version = self.preferred.get(name)
        return self.find(f"{name}=={version}" if version and fits(version, specifier) else f"{name}{specifier}", by)

    def _installed(self, name: str, by: str) -> Package:
        """The target's package of that name, in its (or the preferred) version, to read the requirements of its extras."""
        version = self.have[name] or self.preferred.get(name)
        return self.find(f"{name}=={version}" if version else name, f"{by}, for its extras,")


def _clashes(requirement: Requirement, chosen: Mapping[str, Package]) -> bool:
    package = chosen.get(canonicalize_name(requirement.name))
    return package is not None and not fits(package.version, requirement.specifier)


def _label(package: Package) -> str:
    return f"{package.name} {package.version}"


def fits(version: str | None, specifier: SpecifierSet) -> bool:
    """Whether `version` meets `specifier`; an unknown version (None) does."""
    return version is None or specifier.contains(version, prereleases=True)


def never_carried(name: str) -> bool:
    """Whether a package, by canonical name, must come with the target's image."""
    return _NEVER_CARRIED.fullmatch(name) is not None


def active(requires: Iterable[str], markers: Mapping[str, str]) -> list[Requirement]:
    """The requirements that hold under `markers` without extras."""
    return [requirement for requirement in map(Requirement, requires) if _holds(requirement, "", markers)]


def of_extras(requires: Iterable[str], extras: Collection[str], markers: Mapping[str, str]) -> list[Requirement]:
    """The requirements that hold under `markers` with one of `extras` and not without."""
    return [
        requirement
        for requirement in map(Requirement, requires)
        if not _holds(requirement, "", markers) and any(_holds(requirement, extra, markers) for extra in extras)
    ]


def _holds(requirement: Requirement, extra: str, markers: Mapping[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**markers, "extra": extra})


@dataclass(frozen=True)
class Unmet:
    """A requirement that an environment does not meet; `version` is the installed one, None if there is none."""

    name: str
    requirement: str
    by: str
    version: str | None

    def __str__(self) -> str:
        installed = f"{self.name} {self.version} is installed" if self.version else f"{self.name} is not installed"
        fix = (
            f"use an image with {self.requirement}"
            if never_carried(self.name)
            else "carry it too: download again with --have set to the packages of this Python"
        )
        return f"{self.by} needs {self.requirement}, but {installed}: {fix}"


def unmet(
    roots: Iterable[str], installed: Mapping[str, Package], carried: Collection[str], markers: Mapping[str, str]
) -> list[Unmet]:
    """Unmet requirements of `roots`, of the carried packages, and of packages that use a carried one.

    Requirements of other packages are left to the image.

    Args:
        roots: requirements of the project.
        installed: importable packages, by canonical name.
        carried: canonical names of the packages that came as wheels, which shadow the image's versions.
        markers: values of the environment markers here.
    """
    missing: dict[Unmet, None] = {}
    queue = deque((requirement, PROJECT) for requirement in active(roots, markers))
    for name, package in installed.items():
        needs = active(package.requires, markers)
        affected = [need for need in needs if canonicalize_name(need.name) in carried]
        queue.extend((need, _label(package)) for need in (needs if name in carried else affected))
    seen: set[tuple[str, str]] = set()
    while queue:
        requirement, by = queue.popleft()
        if (str(requirement), by) in seen:
            continue
        seen.add((str(requirement), by))
        name = canonicalize_name(requirement.name)
        package = installed.get(name)
        if package is None or not fits(package.version, requirement.specifier):
            text = f"{name}{requirement.specifier}"
            missing[Unmet(name, text, by, package.version if package else None)] = None
        elif requirement.extras:
            queue.extend((need, _label(package)) for need in of_extras(package.requires, requirement.extras, markers))
    return list(missing)


def project_requirements(root: Path, extras: Collection[str], python: str) -> list[str]:
    """The dependencies of the project at `root`, with those of `extras`.

    Raises:
        WheelsError: the project has no such extra, or does not run on that Python version.
    """
    project = tomllib.loads((root / PROJECT).read_text(encoding="utf-8"))["project"]
    if not SpecifierSet(project["requires-python"]).contains(f"{python}.0"):
        raise WheelsError(f"Python {python}: the project needs {project['requires-python']}")
    optional = project["optional-dependencies"]
    unknown = sorted(set(extras) - set(optional))
    if unknown:
        raise WheelsError(f"--extra {unknown[0]}: the project has {', '.join(sorted(optional))}")
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
