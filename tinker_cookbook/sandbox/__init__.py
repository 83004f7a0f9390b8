"""Run programs that a model wrote, isolated from everything else.

    sandbox = get_sandbox("bubblewrap")
    result = await sandbox.run({"main.py": "print(input())"}, "python3 main.py", stdin="hello", limits=SandboxLimits())

Each run starts from the given files in an empty folder and leaves nothing behind. `SandboxSession` carries the folder
from one run to the next, and offers the methods of tinker-cookbook's sandboxes.
"""

from typing import TYPE_CHECKING

from tinker_cookbook.utils.lazy import exports

if TYPE_CHECKING:
    from tinker_cookbook.sandbox.backends import SandboxBackend, SandboxKeys, get_sandbox, register_sandbox
    from tinker_cookbook.sandbox.sandbox_interface import (
        Sandbox,
        SandboxInterface,
        SandboxLimits,
        SandboxResource,
        SandboxResult,
        SandboxTerminatedError,
    )
    from tinker_cookbook.sandbox.sandboxfusion import SandboxFusionClient
    from tinker_cookbook.sandbox.session import SandboxSession

__all__ = [
    "Sandbox",
    "SandboxBackend",
    "SandboxFusionClient",
    "SandboxInterface",
    "SandboxKeys",
    "SandboxLimits",
    "SandboxResource",
    "SandboxResult",
    "SandboxSession",
    "SandboxTerminatedError",
    "get_sandbox",
    "register_sandbox",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "backends": "SandboxBackend SandboxKeys get_sandbox register_sandbox",
        "sandbox_interface": "Sandbox SandboxInterface SandboxLimits SandboxResource SandboxResult SandboxTerminatedError",
        "sandboxfusion": "SandboxFusionClient",
        "session": "SandboxSession",
    },
)
