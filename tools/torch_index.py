"""Where pip shall look for torch: prints the words that belong into its command line, none for the default index.

    pip install -c constraints.txt $(python -m tools.torch_index) torch

On Linux the default index has builds for CUDA alone, with fifteen packages beside them; torch's own index has builds for CPUs.
They are taken where no NVIDIA driver is found and that index answers. TORCH_INDEX chooses: cpu, default, or an index's address.
It needs nothing but Python, since it runs before anything is installed.
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
    """Whether this machine's kernel, or a machine's below it (WSL), has a driver of NVIDIA. `path`: as PATH, where None."""
    files = ("proc/driver/nvidia/version", "dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1")
    return any((root / file).exists() for file in files) or shutil.which("nvidia-smi", path=path) is not None


def answers(index: str, seconds: float = SECONDS) -> bool:
    """Whether an index has a page about torch. pip goes through the same proxies."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=seconds) as response:
            return response.status == 200
    except (OSError, ValueError):  # no such host, no route, too slow, not found; an address that is none
        return False


def choose(
    environment: Mapping[str, str],
    platform: str = sys.platform,
    driver: Callable[[], bool] = has_nvidia_driver,
    reached: Callable[[str], bool] = answers,
) -> tuple[str | None, str]:
    """The index that is asked besides the default one, and why.

    Args:
        environment: may have VARIABLE: cpu, default, or an address. Unset and empty are the same.
        platform: as `sys.platform`; elsewhere than on Linux the default index has builds for CPUs.
        driver: whether there is a driver of NVIDIA.
        reached: whether an index answers.

    Raises:
        ValueError: VARIABLE is none of these.
    """
    asked = environment.get(VARIABLE, "")
    if asked == "default":
        return None, f"{VARIABLE}=default"
    if asked == "cpu":
        return CPU, f"{VARIABLE}=cpu"
    if asked:
        if "://" not in asked:
            raise ValueError(f"{VARIABLE}={asked!r}: must be cpu, default, or the address of an index")
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
    # Besides the default index, which has all other packages: 2.13.0+cpu goes before 2.13.0 and satisfies its pin.
    if index is not None:
        print(f"--extra-index-url {index}")


if __name__ == "__main__":
    main()
