"""Checks of checkpoints: saved state loads unchanged, and weights can be exported."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import tinker

from tinker_local_backend.conformance.harness import (
    REFUSING,
    Check,
    RefusedError,
    expect,
    expect_close,
    is_refusal,
    offered,
)
from tinker_local_backend.conformance.probe import (
    RANK,
    Floats,
    Probe,
    forward_logprobs,
    prompt,
    sampling_params,
    token_ids,
    train,
)

TOKENS = token_ids(24, 5)
FILES = ["adapter_config.json", "adapter_model.safetensors"]
TTL = 7200
ANY_PROJECT = "conformance"
"""For servers without projects."""


def saved_state(probe: Probe) -> None:
    """create_training_client_from_state loads the weights that save_state saved, with a new optimizer."""
    trainer, path, kept, following = _saved(probe)
    loaded = probe.service.create_training_client_from_state(path).result()
    expect_close(forward_logprobs(loaded, TOKENS), kept, "the loaded weights", atol=0.02)
    info = loaded.get_info()
    expect(info.lora_rank == RANK, f"the loaded client's rank is {info.lora_rank}, expected {RANK}")
    train(loaded)
    difference = np.abs(forward_logprobs(loaded, TOKENS) - following).max()
    expect(difference > 1e-5, "its next step used the saved optimizer")
    expect(loaded.model_id != trainer.model_id, f"the loaded client has the id of the saved one, {loaded.model_id}")


def saved_state_with_optimizer(probe: Probe) -> None:
    """create_training_client_from_state_with_optimizer continues exactly as the saved client."""
    _, path, kept, following = _saved(probe)
    loaded = probe.service.create_training_client_from_state_with_optimizer(path).result()
    expect_close(forward_logprobs(loaded, TOKENS), kept, "the loaded weights", atol=0.02)
    train(loaded)
    moved = float(np.abs(following - kept).max())
    expect_close(forward_logprobs(loaded, TOKENS), following, "its next step", atol=max(5e-3, 0.05 * moved))


def load_state(probe: Probe) -> None:
    """load_state and load_state_with_optimizer, as the first call of a new client."""
    _, path, kept, following = _saved(probe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated since 0.38
        plain, whole = probe.trainer(seed=2), probe.trainer(seed=3)
        offered(lambda: plain.load_state(path).result())
        whole.load_state_with_optimizer(path).result()
    for loaded in (plain, whole):
        expect_close(forward_logprobs(loaded, TOKENS), kept, "the loaded weights", atol=0.02)
    train(whole)
    moved = float(np.abs(following - kept).max())
    expect_close(forward_logprobs(whole, TOKENS), following, "its next step", atol=max(5e-3, 0.05 * moved))


def _saved(probe: Probe) -> tuple[tinker.TrainingClient, str, Floats, Floats]:
    """A client, the path of its saved state, and its logprobs of TOKENS at the save and after one more step."""
    trainer = probe.trainer()
    for _ in range(3):
        train(trainer, rate=4e-3)
    path = trainer.save_state(f"state-{probe.label}").result().path
    expect(path.startswith(f"tinker://{trainer.model_id}/weights/"), f"the path is {path}")
    kept = forward_logprobs(trainer, TOKENS)
    train(trainer)
    return trainer, path, kept, forward_logprobs(trainer, TOKENS)


def saved_sampler(probe: Probe) -> None:
    """A sampling client of a path from save_weights_for_sampler has the weights of that step."""
    trainer = probe.trained(6)
    path = trainer.save_weights_for_sampler(f"sampler-{probe.label}").result().path
    expect(path.startswith(f"tinker://{trainer.model_id}/sampler_weights/"), f"the path is {path}")
    kept = forward_logprobs(trainer, TOKENS)
    train(trainer, rate=1e-2)
    sampler = probe.service.create_sampling_client(model_path=path).result()
    logprobs = [value or 0.0 for value in sampler.compute_logprobs(prompt(TOKENS)).result()[1:]]
    difference = float(np.abs(np.asarray(logprobs) - kept).mean())
    expect(
        difference <= probe.target.tolerance, f"its logprobs differ from the trainer's at the save by {difference:.3g}"
    )
    expect(sampler.get_base_model() == probe.target.model, f"its base model is {sampler.get_base_model()!r}")


def snapshots(probe: Probe) -> None:
    """A sampling snapshot does not change while training goes on."""
    trainer = probe.trained()
    snapshot = trainer.save_weights_and_get_sampling_client().result()
    before = _scores(snapshot)
    for _ in range(4):
        train(trainer, rate=1e-2)
    moved = float(np.abs(forward_logprobs(trainer, TOKENS) - before).mean())
    difference = float(np.abs(_scores(snapshot) - before).mean())
    expect(difference <= probe.target.tolerance / 2 and difference < moved, f"its logprobs moved by {difference:.3g}")


def inflight_samplers(probe: Probe) -> None:
    """A sampler of kind "inflight" samples, and one created after more training has the new weights."""
    trainer = probe.trained()
    first = offered(lambda: trainer.save_weights_and_get_sampling_client(kind="inflight").result())
    _scores(first)
    for _ in range(4):
        train(trainer, rate=1e-2)
    second = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    difference = float(np.abs(_scores(second) - forward_logprobs(trainer, TOKENS)).mean())
    expect(
        difference <= probe.target.tolerance, f"the second one's logprobs differ from the trainer's by {difference:.3g}"
    )
    reply = first.sample(prompt(TOKENS), 1, sampling_params(max_tokens=4)).result()
    expect(len(reply.sequences[0].tokens) == 4, "the first one no longer samples")


def _scores(sampler: tinker.SamplingClient) -> Floats:
    return np.asarray(sampler.compute_logprobs(prompt(TOKENS)).result()[1:], dtype=np.float64)


def time_to_live(probe: Probe) -> None:
    """A checkpoint expires after its ttl, which can be changed and removed."""
    path = probe.trained(1).save_state(f"brief-{probe.label}", ttl_seconds=TTL).result().path

    def seconds_left() -> float | None:
        run_id = path.removeprefix("tinker://").split("/")[0]
        (entry,) = (c for c in probe.rest.list_checkpoints(run_id).result().checkpoints if c.tinker_path == path)
        return None if entry.expires_at is None else (entry.expires_at - datetime.now(UTC)).total_seconds()

    left = seconds_left()
    expect(left is not None and abs(left - TTL) < 600, f"saved with ttl_seconds={TTL}, it has {left} s left")
    offered(lambda: probe.rest.set_checkpoint_ttl_from_tinker_path(path, 2 * TTL).result())
    left = seconds_left()
    expect(left is not None and abs(left - 2 * TTL) < 600, f"after a ttl of {2 * TTL}, it has {left} s left")
    probe.rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    expect(seconds_left() is None, "after a ttl of None it still expires")


def deletion(probe: Probe) -> None:
    """A deleted checkpoint is gone from lists, and cannot be loaded."""
    trainer = probe.trained(1)
    path = trainer.save_state(f"deleted-{probe.label}").result().path
    other = trainer.save_state(f"kept-{probe.label}").result().path
    probe.rest.delete_checkpoint_from_tinker_path(path).result()
    listed = [c.tinker_path for c in probe.rest.list_checkpoints(trainer.model_id).result().checkpoints]
    expect(path not in listed and other in listed, f"after its deletion the list is {listed}")
    try:
        probe.service.create_training_client_from_state(path).result()
    except Exception as error:
        expect(is_refusal(error), f"loading it ended in {type(error).__name__}: {error}")
    else:
        expect(False, "it can still be loaded")


def external_weights(probe: Probe) -> None:
    """save_weights_external gives URLs of the PEFT files, which need no key."""
    trainer = probe.trained(2)
    path = offered(lambda: trainer.save_weights_external(f"export-{probe.label}").result()).path
    urls = probe.rest.get_external_weights_urls(path).result().urls
    names = {url_path.rsplit("/", 1)[-1]: url for url_path, url in urls.items()}
    expect(set(FILES) <= set(names), f"the files are {sorted(names)}, expected {FILES}")
    _expect_peft(lambda name: httpx.get(names[name], follow_redirects=True).raise_for_status().content)


def archive(probe: Probe) -> None:
    """GET .../archive, which SDKs before 0.38 call, leads to a tar with PEFT's files."""
    trainer = probe.trained(2)
    run_id, _, name = trainer.save_weights_for_sampler(f"archive-{probe.label}").result().path[9:].split("/")
    url = f"{probe.target.base_url}/api/v1/training_runs/{run_id}/checkpoints/sampler_weights/{name}/archive"
    answer = httpx.get(url, headers={"X-API-Key": probe.target.api_key}, timeout=60.0)
    if answer.status_code in REFUSING:
        raise RefusedError(f"HTTP {answer.status_code}: {answer.text[:200]}")
    if answer.is_redirect:
        answer = httpx.get(answer.headers["location"], follow_redirects=True, timeout=60.0)
    expect(answer.status_code == 200, f"HTTP {answer.status_code}: {answer.text[:200]}")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        members = {member.name.rsplit("/", 1)[-1]: member for member in tar.getmembers() if member.isfile()}
        expect(set(FILES) <= set(members), f"the archive has {sorted(members)}, expected {FILES}")
        contents = {name: _read(tar, members[name]) for name in FILES}
    _expect_peft(contents.__getitem__)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # it is a plain file
    return file.read()


def _expect_peft(read: Callable[[str], bytes]) -> None:
    """Raise NonconformingError unless the two files are a LoRA adapter of rank RANK whose B is not zero."""
    config = json.loads(read(FILES[0]))
    expect(config.get("r") == RANK, f"{FILES[0]} has r={config.get('r')}, expected {RANK}")
    content = read(FILES[1])
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    end = max(entry["data_offsets"][1] for entry in header.values())
    expect(len(content) == 8 + length + end, f"{FILES[1]} has {len(content)} bytes, its header says {8 + length + end}")
    halves = {half: [name for name in header if f"lora_{half}" in name] for half in ("A", "B")}
    expect(halves["A"] and len(halves["A"]) == len(halves["B"]), f"{FILES[1]} has {len(header)} tensors: {halves}")
    expect(all(RANK in header[name]["shape"] for name in header), f"{FILES[1]} has tensors of another rank than {RANK}")
    trained = [content[8 + length :][slice(*header[name]["data_offsets"])] for name in halves["B"]]
    expect(any(any(part) for part in trained), "every B is zero, as before training")


def copy_weights(probe: Probe) -> None:
    """copy_weights makes a checkpoint of the same weights in a new run, in the project of TINKER_PROJECT_ID."""
    trainer = probe.trained()
    path = trainer.save_state(f"source-{probe.label}").result().path
    project = os.environ.get("TINKER_PROJECT_ID", ANY_PROJECT)
    copied = offered(lambda: probe.rest.copy_weights(path, destination_project_id=project).result())
    expect(copied != path and copied.startswith("tinker://"), f"the copy is {copied}")
    loaded = probe.service.create_training_client_from_state(copied).result()
    expect_close(forward_logprobs(loaded, TOKENS), forward_logprobs(trainer, TOKENS), "the copy's weights", atol=0.02)


CHECKS = tuple(
    Check(ask)
    for ask in (
        saved_state,
        saved_state_with_optimizer,
        load_state,
        saved_sampler,
        snapshots,
        inflight_samplers,
        time_to_live,
        deletion,
        external_weights,
        archive,
        copy_weights,
    )
)
