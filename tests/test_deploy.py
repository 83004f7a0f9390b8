"""What is under deploy/ parses, and every command, key, route and metric in it is one that the programs have.

Which of the files other tools have checked, and which have run, is in docs/operation.md.
"""

import ast
import asyncio
import configparser
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz
import pytest
import yaml

from tinker_cookbook.cli_utils import parse
from tinker_local_backend import environment

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tinker_local_backend.engine.sampling.sampler import SamplerStats
from tinker_local_backend.server.access import Tenant, Terms
from tinker_local_backend.server.config import ServerConfig
from tinker_local_backend.server.gateway import HEALTH_ROUTE, READY_ROUTES
from tinker_local_backend.server.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
SERVER = "tinker_local_backend.server"
PROGRAM = re.compile(r"(?:python[\d.]*|torchrun)\b")


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all(text(name)))


def unit() -> dict[str, dict[str, list[str]]]:
    """Sections of the unit file; a key may stand in several lines."""
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string(re.sub(r"\\\n\s*", " ", text("tinker-local.service")))
    return {name: {key: value.split("\n") for key, value in parser[name].items()} for name in parser.sections()}


def entrypoint() -> list[str]:
    (line,) = [line for line in text("Dockerfile").splitlines() if line.startswith("ENTRYPOINT ")]
    return json.loads(line.removeprefix("ENTRYPOINT "))


def of_shell(script: str) -> Iterator[list[str]]:
    """Commands of a shell script, or of the comments of a file, that start one of our programs."""
    for line in re.sub(r"\\\n\s*", " ", script).splitlines():
        words = shlex.split(line.removeprefix("#"), comments=True) if "-m " in line and "=" in line else []
        starts = [i for i, word in enumerate(words) if PROGRAM.fullmatch(word.rpartition("/")[2])]
        for start in starts:
            ends = [i for i, word in enumerate(words) if word.endswith(";") and i > start] or [len(words)]
            yield [word.removesuffix(";") for word in words[start : ends[0] + 1]]


def of_modal() -> Iterator[list[str]]:
    names: dict[str, Any] = {}
    for node in ast.parse(text("modal_app.py")).body:
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id.isupper():
                value = eval(compile(ast.Expression(node.value), "modal_app.py", "eval"), {}, dict(names))
                names[target.id] = [*names.get(target.id, []), *value] if isinstance(value, list) else value
    yield from (value for value in names.values() if isinstance(value, list))


def of_kubernetes() -> Iterator[list[str]]:
    for document in documents("kubernetes.yaml"):
        for container in document["spec"].get("template", {}).get("spec", {}).get("containers", []):
            yield [*container["command"], *container["args"]]


def commands() -> dict[str, list[list[str]]]:
    """File -> command lines."""
    # What the user types after `sbatch deploy/slurm.sh serve|train` takes the place of "$@".
    slurm = text("slurm.sh")
    typed = dict(re.findall(r"slurm\.sh (serve|train) (.*)", slurm))
    bodies = re.findall(r"^(serve|train)\)\n(.*?);;", slurm, re.DOTALL | re.MULTILINE)
    sky = documents("skypilot.yaml")[0]
    return {
        "tinker-local.service": [shlex.split(unit()["Service"]["ExecStart"][0])],
        "compose.yaml": [[*entrypoint(), *documents("compose.yaml")[0]["services"]["server"]["command"]]],
        "slurm.sh": [c for what, body in bodies for c in of_shell(body.replace('"$@"', typed[what]))],
        "kubernetes.yaml": [*of_kubernetes()],
        "skypilot.yaml": [*of_shell(sky["run"])],
        "modal_app.py": [*of_modal()],
    }


def check(words: list[str]) -> str:
    """The module of a command line, all of whose keys it takes."""
    at = words.index("-m")
    module, arguments = words[at + 1], words[at + 2 :]
    assert all("=" in argument for argument in arguments), words
    if module.startswith("recipes."):
        parse(importlib.import_module(module).CLIConfig, arguments)
    elif module == SERVER:
        chz.Blueprint(ServerConfig).make_from_argv(arguments)
    else:
        chz.Blueprint(importlib.import_module(module).Config).make_from_argv(arguments)
    return module


def test_every_file_with_commands_serves_and_what_can_train_trains() -> None:
    found = {name: [check(words) for words in lines] for name, lines in commands().items()}
    assert all(SERVER in modules for modules in found.values()), found
    trains = {name for name, modules in found.items() if "recipes.rl_basic" in modules}
    assert trains == {"slurm.sh", "kubernetes.yaml", "skypilot.yaml", "modal_app.py"}
    assert "tinker_local_backend.backup" in found["skypilot.yaml"]


def test_a_key_that_no_program_has_is_noticed() -> None:
    for words in (["python", "-m", SERVER, "modle=x"], ["python", "-m", SERVER, "port=many"]):
        with pytest.raises(Exception, match=r"modle|port"):
            check(words)
    with pytest.raises(Exception, match="no_such_key"):
        check(["python", "-m", "recipes.rl_basic", "no_such_key=1"])


def test_every_file_is_named_on_the_page() -> None:
    page = (ROOT / "docs" / "operation.md").read_text()
    files = [path.relative_to(ROOT) for path in DEPLOY.rglob("*") if path.is_file()]
    files = [file for file in files if not {"__pycache__", "secrets"} & {*file.parts}]
    assert len(files) > 10
    assert [str(file) for file in files if f"`{file.name}`" not in page] == []


def test_what_is_mounted_or_copied_exists() -> None:
    (compose,) = documents("compose.yaml")
    mounts = [volume for service in compose["services"].values() for volume in service.get("volumes", [])]
    local = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(local) == 6 and all((DEPLOY / mount).is_file() for mount in local)
    named = {mount.split(":")[0] for mount in mounts if not mount.startswith(".")}
    assert named == set(compose["volumes"])
    wanted = {secret for service in compose["services"].values() for secret in service.get("secrets", [])}
    assert wanted == set(compose["secrets"])
    assert (ROOT / compose["services"]["server"]["build"]["dockerfile"]).is_file()
    copied = re.findall(r"^COPY (\S+)", text("Dockerfile"), re.MULTILINE)
    assert copied and all((ROOT / name).exists() for name in copied)
    keys = {str(Path(secret["file"]).parent) for secret in compose["secrets"].values()}
    assert keys == {"secrets"} and "/deploy/secrets" in text("Dockerfile.dockerignore").splitlines()
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    (gpu,) = documents("compose.gpu.yaml")
    assert set(gpu["services"]) <= set(compose["services"])


def test_probes_ask_for_routes_that_answer_without_a_key() -> None:
    routes = {HEALTH_ROUTE, *READY_ROUTES}
    found = [
        probe["httpGet"]["path"]
        for document in documents("kubernetes.yaml")
        for container in document["spec"].get("template", {}).get("spec", {}).get("containers", [])
        for key, probe in container.items()
        if key.endswith("Probe")
    ]
    found.append(documents("skypilot.yaml")[0]["service"]["readiness_probe"]["path"])
    found += re.findall(r"127\.0\.0\.1:8000(/\w+)'", text("Dockerfile") + text("compose.yaml"))
    assert len(found) == 6 and set(found) <= routes


def test_supervisors_wait_as_long_as_a_server_may_take_to_stop() -> None:
    defaults = ServerConfig(model="m")
    longest = defaults.shutdown_seconds + defaults.fetch_seconds + 15  # the last answers, and the engine's process
    (compose,) = documents("compose.yaml")
    waits = [float(unit()["Service"]["TimeoutStopSec"][0])]
    waits += [float(compose["services"]["server"]["stop_grace_period"].removesuffix("s"))]
    waits += [d["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
              for d in documents("kubernetes.yaml") if "template" in d["spec"]]  # fmt: skip
    waits += [float(re.findall(r"--signal=TERM@(\d+)", text("slurm.sh"))[0])]
    assert len(waits) == 5 and min(waits) >= longest


def test_dashboard_and_alerts_ask_for_metrics_that_there_are() -> None:
    async def shown() -> str:
        metrics = Metrics()
        live = ("sessions", "models", "samplers", "requests", "sampling_requests", "oldest_request_seconds")
        metrics.watch(lambda: dict.fromkeys(live, 0.0))
        metrics.engine.samplers = {"m": SamplerStats(3, 2, 10, 6, 4, 1, 0, 9.0, 0.5, 7.0)._asdict()}
        return metrics.text(Tenant("operator", ROOT, Terms(operator=True))).decode()

    page = asyncio.run(shown())
    known = {re.sub(r"_created$", "", name) for name in re.findall(r"^# TYPE (\w+)", page, re.MULTILINE)} | {"up"}
    dashboard = json.loads(text("grafana/dashboard.json"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [rule["expr"] for group in documents("alerts.yml")[0]["groups"] for rule in group["rules"]]
    names = {name for query in asked for name in re.findall(r"\b(?:tinker_\w+|up)\b", query)}
    assert len(names) > 8 and names <= known, names - known
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    (source,) = documents("grafana/provisioning.yaml")[0]["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


def test_variables_of_ours_are_ones_that_we_read() -> None:
    """A server refuses to start where one is set that it does not know."""
    everything = "\n".join(path.read_text() for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc")
    names = set(re.findall(r"\bTINKER_[A-Z_]+[A-Z]\b", everything))
    assert "TINKER_LOCAL_HOME" in names
    for name in names:
        assert name in environment.VARIABLES, name
