"""bubblewrap called by an ordinary user, without control groups: what makes root give up its rights is then not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import python_path
from tests.sandbox.running import usable
from tests.waiting import HANG_SECONDS

SYSTEM_PYTHON = Path("/usr/bin/python3")

PROGRAM = """
import os, sys
# What is imported later lies in a folder that the user may not read.
import asyncio, encodings.idna, json, resource, subprocess, selectors, tarfile
import tinker_cookbook.sandbox.bubblewrap as bubblewrap
from tinker_cookbook.sandbox import SandboxLimits, get_sandbox
sys.base_prefix = "/usr"
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sandbox = get_sandbox("bubblewrap")
sandbox.check()
bounds = bubblewrap.find_bounds()
limits = SandboxLimits(wall_s=60.0, cpu_s=1.0, memory_mb=128, processes=32, disk_mb=8)
out = {"groups": bounds.groups is not None, "as_root": bounds.as_root}
for name, command in json.load(sys.stdin).items():
    result = asyncio.run(sandbox.run({}, command, limits=limits))
    out[name] = [result.stdout, result.stderr[-300:], result.exit_code, result.limit]
print(json.dumps(out))
"""

ATTEMPTS = {
    "identity": "id -u; grep -E '^(CapEff|CapPrm)' /proc/self/status",
    "environment": "cat /proc/*/environ",
    "bomb": "python3 -c 'import os, time\nfor _ in range(9): os.fork()\ntime.sleep(0.3)'; echo over",
    "memory": "python3 -c 'x = bytearray(10 ** 10); print(1)'",
    "memory of nobody": "python3 -c 'import os; os.memfd_create(\"x\")' || echo refused",
    "cpu": "while true; do :; done",
    "disk": "head -c 100000000 /dev/zero > /tmp/x; stat -c %s /tmp/x",
    "devices": "echo x > /dev/y || echo refused",
    "namespaces": "unshare --user --map-root-user id || echo refused",
    "network": "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 5)' || echo refused",
    "signals": f"kill -9 {os.getpid()} || echo refused",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_holds_for_root_holds_for_a_user() -> None:
    import json

    usable()
    if not SYSTEM_PYTHON.exists():
        pytest.skip(f"there is no {SYSTEM_PYTHON}, and a user may not read root's")
    packages = os.pathsep.join([python_path(), *(path for path in sys.path if path.endswith("site-packages"))])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(ATTEMPTS),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": packages, "TINKER_API_KEY": "tml-s3cret"},
    )
    if "user namespaces" in done.stderr or "older than" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["as_root"] is False
    stdout = {name: got[name][0] for name in ATTEMPTS}
    assert stdout["identity"].split() == ["65534", "CapPrm:", "0" * 16, "CapEff:", "0" * 16]
    assert "s3cret" not in stdout["environment"]
    assert got["memory"][2] != 0 and stdout["memory"] == ""
    assert "Resource temporarily unavailable" in got["bomb"][1] or got["bomb"][3] in ("memory_mb", "processes")
    assert got["cpu"][3] == "cpu_s"
    assert int(stdout["disk"]) < 16 << 20 and got["disk"][3] == "disk_mb"
    for name in ("memory of nobody", "devices", "namespaces", "network", "signals"):
        assert "refused" in stdout[name], name
