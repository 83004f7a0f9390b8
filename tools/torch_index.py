"""Chooses the index from which pip installs torch: prints the arguments for pip, none for the default index.

    pip install -c constraints.txt $(python -m tools.torch_index) torch

On Linux the default index has only CUDA builds, which need fifteen more packages; torch's own index has CPU builds. These are
chosen if there is no NVIDIA driver and that index answers. TORCH_INDEX overrides this: cpu, default, or the URL of an index. It
needs only Python, because it runs before anything is installed.
"""

import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "TORCH_INDEX"
CPU = "https://download.pytorch.org/whl/cpu"
SECONDS = 5.0


def has_nvidia_driver(root: Path = Path("/"), path: str | None = None) -> bool:
    """Whether this machine, or the host below it (WSL), has an NVIDIA driver. `path`: search path; None: PATH."""
    files = ("proc/driver/nvidia/version", "dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1")
    return any((root / file).exists() for file in files) or shutil.which("nvidia-smi", path=path) is not None


def answers(index: str, seconds: float = SECONDS) -> bool:
    """Whether an index has a page about torch. pip goes through the same proxies."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=seconds) as response:
            return response.status == 200
    except (OSError, ValueError):  # no such host, no route, too slow, not found, or not a URL
        return False


def choose(
    environment: Mapping[str, str],
    platform: str = sys.platform,
    driver: Callable[[], bool] = has_nvidia_driver,
    reached: Callable[[str], bool] = answers,
) -> tuple[str | None, str]:
    """The index to use in addition to the default one, and the reason.

    Args:
        environment: may have VARIABLE: cpu, default, or a URL. Unset and empty are the same.
        platform: as `sys.platform`; except on Linux, the default index has CPU builds.
        driver: whether there is an NVIDIA driver.
        reached: whether an index answers.

    Raises:
        ValueError: VARIABLE has another value.
    """
    asked = environment.get(VARIABLE, "")
    if asked == "default":
        return None, f"{VARIABLE}=default"
    if asked == "cpu":
        return CPU, f"{VARIABLE}=cpu"
    if asked:
        if "://" not in asked:
            raise ValueError(f"{VARIABLE}={asked!r}: must be cpu, default, or the URL of an index")
        return asked, VARIABLE
    if platform != "linux":
        return None, "its builds for this system need no CUDA"
    if driver():
        return None, "there is an NVIDIA driver"
    if not reached(CPU):
        return None, f"{CPU} does not answer"
    return CPU, "there is no NVIDIA driver"


def main() -> None:
    try:
        index, why = choose(os.environ)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"torch from {index or 'the default index'}: {why} ({VARIABLE}=cpu|default|ADDRESS chooses)", file=sys.stderr)
    # In addition to the default index, which has all other packages: 2.13.0+cpu is preferred to 2.13.0 and satisfies its pin.
    if index is not None:
        print(f"--extra-index-url {index}")


if __name__ == "__main__":
    main()
