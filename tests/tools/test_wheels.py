"""What a machine without a network needs, in which versions, and which needs are unmet there. All packages are made up."""

from collections.abc import Mapping

import pytest
from pip._vendor.packaging.requirements import Requirement

from tools.wheels import needs
from tools.wheels.__main__ import IMPORTED, ROOT
from tools.wheels.needs import Package, Target, WheelsError

TARGET = Target("3.12", "manylinux_2_28_x86_64")


# ---- the target


def test_all_older_tags_are_accepted() -> None:
    tags = TARGET.platforms()
    assert tags[0] == "manylinux_2_28_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"} <= set(tags)
    assert "manylinux_2_31_x86_64" not in tags
    assert "manylinux2014_aarch64" in Target("3.11", "manylinux_2_17_aarch64").platforms()


@pytest.mark.parametrize(
    ("python", "platform", "named"),
    [
        ("3", "manylinux_2_28_x86_64", "--python '3'"),
        ("3.12.1", "manylinux_2_28_x86_64", "--python '3.12.1'"),
        ("3.12", "linux_x86_64", "--platform 'linux_x86_64'"),
        ("3.12", "manylinux2014_x86_64", "--platform 'manylinux2014_x86_64'"),
    ],
)
def test_a_malformed_target_is_refused(python: str, platform: str, named: str) -> None:
    with pytest.raises(WheelsError, match=named):
        Target(python, platform)


@pytest.mark.parametrize(
    ("marker", "holds"),
    [
        ('python_version < "3.12"', False),
        ('python_version >= "3.12"', True),
        ('python_full_version < "3.12.1"', True),
        ('sys_platform == "win32"', False),
        ('platform_system == "Linux" and platform_machine == "x86_64"', True),
        ('platform_machine == "aarch64"', False),
        ('implementation_name == "pypy"', False),
        ('extra == "fast"', False),
    ],
)
def test_markers_are_those_of_the_target(marker: str, holds: bool) -> None:
    found = needs.active([f"thing>=1; {marker}"], TARGET.markers())
    assert [requirement.name for requirement in found] == (["thing"] if holds else [])


def test_markers_differ_between_targets() -> None:
    backport = ['backport; python_version < "3.12"']
    assert needs.active(backport, Target("3.11", TARGET.platform).markers())
    assert not needs.active(backport, TARGET.markers())


def test_extras_bring_their_own_requirements_alone() -> None:
    requires = [
        "base",
        'h2; extra == "http2"',
        'socks; extra == "socks"',
        'old; extra == "http2" and python_version < "3.9"',
    ]
    assert [need.name for need in needs.of_extras(requires, ["http2"], TARGET.markers())] == ["h2"]


# ---- what the target has


def test_a_have_file_is_read() -> None:
    text = "# an image\nTyping_Extensions==4.12.0\ntorch==2.11.0+cu130\n\nnumpy  # any\n"
    expected = {"typing-extensions": "4.12.0", "torch": "2.11.0+cu130", "numpy": None}
    assert needs.parse_have(text, "have.txt") == expected


@pytest.mark.parametrize("line", ["numpy 2.0", "numpy==two", "==1.0", "Package    Version", "numpy>=2"])
def test_a_line_that_is_not_understood_is_named(line: str) -> None:
    with pytest.raises(WheelsError, match=r"have\.txt, line 2: .*pip list --format=freeze"):
        needs.parse_have(f"torch==2.11.0\n{line}\n", "have.txt")


def test_the_default_list_holds_what_it_says() -> None:
    have = needs.parse_have("\n".join(needs.COMMON_IMAGE.split()), "the default list")
    assert {
        "torch",
        "transformers",
        "peft",
        "numpy",
        "safetensors",
        "pytest",
        "hypothesis",
        "pyarrow",
        "pandas",
    } <= set(have)
    assert not set(have) & {*IMPORTED, "typing-extensions"}


# ---- what is needed


class Shelf:
    """An index of made-up packages: `name -> version -> Requires-Dist`. Gives the newest that meets a requirement."""

    def __init__(self, packages: Mapping[str, Mapping[str, list[str]]]) -> None:
        self.packages = packages
        self.asked: list[str] = []

    def find(self, requirement: str, by: str) -> Package:
        self.asked.append(requirement)
        need = Requirement(requirement)
        for version, requires in reversed(list(self.packages.get(need.name, {}).items())):
            if need.specifier.contains(version):
                return Package(need.name, version, tuple(requires))
        raise WheelsError(f"no {requirement}, which {by} needs")


def carried(
    shelf: Shelf, roots: list[str], have: str = "", constraints: str = "", target: Target = TARGET
) -> dict[str, str]:
    """Name and version of what is needed."""
    there, preferred = needs.parse_have(have, "have.txt"), needs.parse_constraints(constraints)
    found = needs.needed(roots, there, preferred, target.markers(), shelf.find)
    return {name: package.version for name, package in found.items()}


def test_only_what_is_missing_is_carried_with_all_that_it_needs() -> None:
    shelf = Shelf({"a": {"1.0": ["b>=1", "c"]}, "b": {"1.0": ["d"]}, "d": {"1.0": ["A"]}})
    assert carried(shelf, ["a", "c"], have="c==3") == {"a": "1.0", "b": "1.0", "d": "1.0"}
    assert carried(shelf, ["a", "c"], have="a==1.0\nc") == {}


def test_what_is_too_old_there_is_carried_and_an_unknown_version_is_trusted() -> None:
    shelf = Shelf({"a": {"1.0": [], "2.0": []}})
    assert carried(shelf, ["a>=2"], have="a==1.0") == {"a": "2.0"}
    assert carried(shelf, ["a>=2"], have="a==2.1") == {}
    assert carried(shelf, ["a>=2"], have="a") == {}


def test_a_need_of_something_carried_may_be_too_new_for_the_target() -> None:
    shelf = Shelf({"a": {"1.0": ["numpy>=2.3"]}, "numpy": {"2.0": [], "2.4": []}})
    assert carried(shelf, ["numpy>=1.26", "a"], have="numpy==2.0") == {"a": "1.0", "numpy": "2.4"}


def test_markers_of_the_target_decide_what_a_package_needs() -> None:
    shelf = Shelf(
        {"a": {"1.0": ['backport; python_version < "3.12"', 'tzdata; sys_platform == "win32"']}, "backport": {"1": []}}
    )
    assert carried(shelf, ["a"]) == {"a": "1.0"}
    assert carried(shelf, ["a"], target=Target("3.11", TARGET.platform)) == {"a": "1.0", "backport": "1"}


def test_pinned_versions_are_preferred_where_they_fit() -> None:
    shelf = Shelf({"a": {"1.0": [], "2.0": [], "3.0": []}})
    assert carried(shelf, ["a"]) == {"a": "3.0"}
    assert carried(shelf, ["a"], constraints="# pins\nA==2.0\n") == {"a": "2.0"}
    assert carried(shelf, ["a<2"], constraints="a==2.0") == {"a": "1.0"}


def test_one_version_of_each_that_meets_every_requirement_whoever_comes_first() -> None:
    packages = {"a": {"1.0": ["c<3"]}, "b": {"1.0": ["c>=2"]}, "c": {"1.0": [], "2.5": [], "3.0": ["only-of-3"]}}
    for roots in (["a", "b", "c"], ["c", "b", "a"]):
        assert carried(Shelf(packages), roots) == {"a": "1.0", "b": "1.0", "c": "2.5"}


def test_requirements_without_a_common_version_are_an_error() -> None:
    shelf = Shelf({"a": {"1.0": ["c<2"]}, "b": {"1.0": ["c>=2"]}, "c": {"1.0": [], "2.0": []}})
    with pytest.raises(WheelsError, match=r"no c(<2,>=2|>=2,<2)"):
        carried(shelf, ["a", "b"])


def test_extras_of_what_is_there_are_carried_without_it() -> None:
    shelf = Shelf({"httpx": {"0.28": ["idna", 'h2<5; extra == "http2"'], "0.29": []}, "h2": {"4.0": []}})
    assert carried(shelf, ["httpx[http2]"], have="httpx==0.28\nidna") == {"h2": "4.0"}
    assert shelf.asked[0] == "httpx==0.28"  # the extras of the version that is there


def test_extras_may_name_other_extras() -> None:
    shelf = Shelf({"a": {"1": ['a[fast]; extra == "all"', 'c; extra == "fast"', 'd; extra == "slow"']}, "c": {"1": []}})
    assert carried(shelf, ["a[all]"]) == {"a": "1", "c": "1"}


@pytest.mark.parametrize("name", ["torch", "triton", "nvidia-cublas", "cuda-toolkit"])
def test_torch_and_its_cuda_packages_are_never_carried(name: str) -> None:
    shelf = Shelf({name: {"9.0": []}})
    for have, there in (("", "has none"), (f"{name}==1.0", "has version 1.0")):
        with pytest.raises(WheelsError, match=rf"pyproject.toml needs {name}>=2, the target {there}.* never carried"):
            carried(shelf, [f"{name}>=2"], have=have)
    assert carried(shelf, [f"{name}>=2"], have=f"{name}==2.1+cu130") == {}
    assert shelf.asked == []
    assert not needs.never_carried("torchmetrics")


# ---- what is unmet


def unmet(roots: list[str], carried: set[str], **installed: tuple[str, list[str]]) -> list[str]:
    packages = {name: Package(name, version, tuple(requires)) for name, (version, requires) in installed.items()}
    return [str(need) for need in needs.unmet(roots, packages, carried, TARGET.markers())]


def test_a_complete_environment_has_nothing_unmet() -> None:
    assert unmet(["a>=1", 'x; sys_platform == "win32"'], {"a"}, a=("1.5", ["b"]), b=("1", ["image-only"])) == []


def test_missing_and_old_packages_are_named_with_the_fix() -> None:
    found = unmet(["a>=1", "b>=2", "torch>=2.10"], {"a"}, a=("1.5", ["c"]), b=("1.9", []), torch=("2.9.1", []))
    assert sorted(found) == [
        "a 1.5 needs c, but c is not installed: carry it too: download again with --have set to the packages of this Python",
        "pyproject.toml needs b>=2, but b 1.9 is installed: carry it too: download again with --have set to the packages of this "
        "Python",
        "pyproject.toml needs torch>=2.10, but torch 2.9.1 is installed: use an image with torch>=2.10",
    ]


def test_a_carried_package_that_hides_another_must_suit_those_that_use_it() -> None:
    found = unmet(["hub"], {"hub"}, hub=("2.0", []), transformers=("5.0", ["hub<2"]))
    assert len(found) == 1
    assert found[0].startswith("transformers 5.0 needs hub<2, but hub 2.0 is installed")


def test_extras_of_installed_packages_are_checked() -> None:
    httpx = ("0.28", ['h2; extra == "http2"'])
    assert unmet(["httpx[http2]"], set(), httpx=httpx, h2=("4", [])) == []
    assert "httpx 0.28 needs h2, but h2 is not installed" in unmet(["httpx[http2]"], set(), httpx=httpx)[0]


def test_the_project_names_its_requirements_and_extras() -> None:
    plain = needs.project_requirements(ROOT, [], "3.12")
    assert set(plain) < set(needs.project_requirements(ROOT, ["math"], "3.12"))
    with pytest.raises(WheelsError, match=r"--extra maths: the project has .*math"):
        needs.project_requirements(ROOT, ["maths"], "3.12")
    with pytest.raises(WheelsError, match=r"Python 3.10: the project needs >=3.11"):
        needs.project_requirements(ROOT, [], "3.10")
