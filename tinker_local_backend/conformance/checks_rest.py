"""Checks of calls that list and describe runs, checkpoints, sessions and the caller."""

from __future__ import annotations

import tinker

from tinker_local_backend.conformance.harness import Check, RefusedError, describe, expect, offered
from tinker_local_backend.conformance.probe import RANK, Probe

PAGE = 20


def training_runs(probe: Probe) -> None:
    """A run is described and listed with the settings that it was created with."""
    trainer = probe.trainer(user_metadata={"who": probe.label})
    run = probe.rest.get_training_run(trainer.model_id).result()
    expect(run.training_run_id == trainer.model_id, f"asked for {trainer.model_id}, got {run.training_run_id}")
    expect(run.base_model == probe.target.model, f"its base model is {run.base_model!r}")
    expect(run.is_lora and run.lora_rank == RANK, f"is_lora={run.is_lora}, lora_rank={run.lora_rank}")
    expect((run.user_metadata or {}).get("who") == probe.label, f"its user_metadata are {run.user_metadata}")
    listed = probe.rest.list_training_runs(limit=PAGE).result()
    expect(trainer.model_id in [r.training_run_id for r in listed.training_runs], "the newest runs do not include it")
    expect(listed.cursor.total_count >= len(listed.training_runs), f"the cursor is {listed.cursor}")


def checkpoints(probe: Probe) -> None:
    """Checkpoints of each kind are listed with their size, and name their run."""
    trainer = probe.trained(1)
    paths = {
        "training": trainer.save_state(f"listed-{probe.label}").result().path,
        "sampler": trainer.save_weights_for_sampler(f"listed-{probe.label}").result().path,
    }
    listed = {c.tinker_path: c for c in probe.rest.list_checkpoints(trainer.model_id).result().checkpoints}
    for kind, path in paths.items():
        expect(path in listed, f"{path} was saved and is not listed: {sorted(listed)}")
        entry = listed[path]
        expect(entry.checkpoint_type == kind, f"{path} is listed as {entry.checkpoint_type!r}")
        expect(path.endswith(f"/{entry.checkpoint_id}"), f"{path} has the id {entry.checkpoint_id!r}")
        expect(entry.size_bytes is None or entry.size_bytes > 0, f"{path} has {entry.size_bytes} bytes")
    run = probe.rest.get_training_run_by_tinker_path(paths["training"]).result()
    expect(run.training_run_id == trainer.model_id, f"{paths['training']} is attributed to run {run.training_run_id}")
    expect(run.last_checkpoint is not None, "the run's last_checkpoint is None")


def user_checkpoints(probe: Probe) -> None:
    """The newest checkpoints of all runs include the one that was just saved."""
    path = probe.trained(1).save_state(f"newest-{probe.label}").result().path
    listed = offered(lambda: probe.rest.list_user_checkpoints(limit=PAGE).result())
    expect(path in [c.tinker_path for c in listed.checkpoints], f"{path} is not among the newest {PAGE}")


def publishing(probe: Probe) -> None:
    """A checkpoint can be published and unpublished."""
    trainer = probe.trained(1)
    path = trainer.save_state(f"public-{probe.label}").result().path

    def is_public() -> bool:
        (entry,) = (
            c for c in probe.rest.list_checkpoints(trainer.model_id).result().checkpoints if c.tinker_path == path
        )
        return entry.public

    expect(not is_public(), "it is public from the start")
    offered(lambda: probe.rest.publish_checkpoint_from_tinker_path(path).result())
    expect(is_public(), "it was published and is not public")
    probe.rest.unpublish_checkpoint_from_tinker_path(path).result()
    expect(not is_public(), "it was unpublished and is still public")


def weights_info(probe: Probe) -> None:
    """get_weights_info_by_tinker_path states what is needed to load a checkpoint."""
    path = probe.trainer(train_unembed=False).save_state(f"info-{probe.label}").result().path
    info = probe.rest.get_weights_info_by_tinker_path(path).result()
    expect(info.base_model == probe.target.model, f"base_model is {info.base_model!r}")
    expect(info.is_lora and info.lora_rank == RANK, f"is_lora={info.is_lora}, lora_rank={info.lora_rank}")
    expect(info.train_unembed is not True, f"train_unembed is {info.train_unembed}, requested False")


def sessions(probe: Probe) -> None:
    """A session is listed, and names the runs that were created in it."""
    trainer = probe.trainer()
    session_id = trainer.model_id.split(":")[0]
    listed = offered(lambda: probe.rest.list_sessions(limit=PAGE).result()).sessions
    expect(session_id in listed, f"session {session_id} is not among the newest {PAGE}")
    session = probe.rest.get_session(session_id).result()
    expect(trainer.model_id in session.training_run_ids, f"its runs are {session.training_run_ids}")
    metadata = session.user_metadata or {}
    expect(metadata.get("conformance") == probe.label, f"its user_metadata are {session.user_metadata}")


def samplers(probe: Probe) -> None:
    """A session names its samplers, and each is described."""
    trainer = probe.trained(1)
    path = trainer.save_weights_for_sampler(f"described-{probe.label}").result().path
    probe.service.create_sampling_client(model_path=path).result()
    session = offered(lambda: probe.rest.get_session(trainer.model_id.split(":")[0]).result())
    expect(len(session.sampler_ids) == 1, f"the session's samplers are {session.sampler_ids}, expected one")
    sampler = probe.rest.get_sampler(session.sampler_ids[0]).result()
    expect(sampler.base_model == probe.target.model, f"its base model is {sampler.base_model!r}")
    expect(sampler.model_path == path, f"its model_path is {sampler.model_path!r}, expected {path}")


def whoami(probe: Probe) -> None:
    """whoami names the caller, if the server issues tokens that identify callers."""
    try:
        caller = probe.rest.whoami().result()
    except (tinker.TinkerError, RuntimeError) as error:  # the SDK raises this itself if it has no token
        raise RefusedError(describe(error)) from error
    expect(caller.user_urn and caller.org_urn, f"user_urn={caller.user_urn!r}, org_urn={caller.org_urn!r}")


def console_url(probe: Probe) -> None:
    """get_console_url names the run; the SDK makes it without asking the server."""
    trainer = probe.trainer()
    expect(
        trainer.model_id in trainer.get_console_url(), f"{trainer.get_console_url()} does not name {trainer.model_id}"
    )


CHECKS = tuple(
    Check(ask)
    for ask in (
        training_runs,
        checkpoints,
        user_checkpoints,
        publishing,
        weights_info,
        sessions,
        samplers,
        whoami,
        console_url,
    )
)
