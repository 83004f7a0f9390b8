"""What the engine's process can be asked to do: one method per operation, from a frame's fields to a future of a reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import tinker

from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.sampling.requests import Origin
from tinker_local_backend.engine.training.datums import OwnedData
from tinker_local_backend.errors import RequestError
from tinker_local_backend.futures import EngineFuture, completed, resolve
from tinker_local_backend.sampling_client import SamplingClient, open_checkpoint
from tinker_local_backend.server.progress import Progress
from tinker_local_backend.storage.info import read_info
from tinker_local_backend.storage.paths import CheckpointPath
from tinker_local_backend.storage.registry import Registry, Run, Session
from tinker_local_backend.training_client import Pass, TrainingClient, TrainingRun, load_checkpoint
from tinker_local_backend.wire import codec
from tinker_local_backend.wire.compression import decompress
from tinker_local_backend.wire.frames import Frame

Fields = Mapping[str, Any]
Reply = tuple[EngineFuture[Any], Callable[[Any], Frame]]
"""What is waited for, and how its result is put into a frame, by the thread that ends it."""


class Operations:
    """The adapters and samplers of all sessions over one engine.

    Called on a thread without an event loop: the engine then runs what is submitted as it comes, in no lockstep with anybody.

    Args:
        tell: takes the number of an operation and a frame about what there is of its result; it returns at once.
    """

    def __init__(self, engine: Engine, tell: Callable[[int, Frame], None]):
        self._engine = engine
        self._tell = tell
        self._models: dict[str, TrainingClient] = {}
        self._samplers: dict[str, Future[SamplingClient]] = {}

    def run(self, frame: Frame) -> Reply:
        """Submit a frame's operation. Raises RequestError for what cannot be submitted."""
        method: Callable[[Fields, bytes], Reply] = getattr(self, f"op_{frame.fields['op']}")
        return method(frame.fields, frame.body)

    # Models

    def op_create_model(self, fields: Fields, body: bytes) -> Reply:
        """A new adapter: model_id, base_model, rank, train_*, seed, user_metadata, home, session."""
        spec = LoraSpec(fields["rank"], fields["train_attn"], fields["train_mlp"], fields["train_unembed"])

        def create() -> TrainingClient:
            seed = self._engine.random_seed() if fields["seed"] is None else fields["seed"]
            run = self._new_run(fields, fields["base_model"], spec, seed, fields["user_metadata"])
            run.record(has_saved=False)
            return TrainingClient(run, self._engine)

        return self._keep_model(fields, create)

    def op_load_model(self, fields: Fields, body: bytes) -> Reply:
        """A new adapter from a checkpoint: model_id, path, optimizer, base_model or None, user_metadata, home, session."""
        path = CheckpointPath.parse(fields["path"])
        info = read_info(Path(fields["home"]), path)
        if fields["base_model"] not in (None, info.base_model):
            raise RequestError(f"checkpoint {path} is of base model {info.base_model!r}, not {fields['base_model']!r}")
        metadata = {**info.user_metadata, **fields["user_metadata"]}

        def create() -> TrainingClient:
            run = self._new_run(fields, info.base_model, info.spec, 0, metadata)
            load_checkpoint(run, path, fields["optimizer"])
            run.record(has_saved=False)
            return TrainingClient(run, self._engine)

        return self._keep_model(fields, create)

    def _new_run(
        self, fields: Fields, base_model: str, spec: LoraSpec, seed: int, metadata: Mapping[str, str]
    ) -> TrainingRun:
        registry, session = Registry(Path(fields["home"])), Session(**fields["session"])
        entry = Run(fields["model_id"], session.session_id, base_model, spec, dict(metadata))
        return TrainingRun.create(self._engine, registry, session, entry, seed, tenant=fields["tenant"])

    def _keep_model(self, fields: Fields, create: Callable[[], TrainingClient]) -> Reply:
        def keep(client: TrainingClient) -> Frame:
            self._models[fields["model_id"]] = client
            info = client.get_info()
            return Frame(
                {
                    "base_model": info.model_data.model_name,
                    "rank": info.lora_rank,
                    "arch": info.model_data.arch,
                    "execution": info.execution,
                }
            )

        return self._engine.make_client(create), keep

    def _model(self, fields: Fields) -> TrainingClient:
        model = self._models.get(fields["model_id"])
        if model is None:
            raise RequestError(f"model {fields['model_id']!r} is not loaded: its session has ended")
        return model

    def op_forward_backward(self, fields: Fields, body: bytes) -> Reply:
        def read() -> Pass:
            """When its turn has come: what waits is as small as it came."""
            plain = decompress(body, fields["decompressed"]) if "decompressed" in fields else body
            message = codec.parse_forward_backward(plain)
            return OwnedData(codec.datums(message)), message.loss_fn, codec.loss_config(message)

        return (
            self._model(fields).pass_over(read, not fields["forward_only"], fields["tokens"]),
            lambda output: Frame({"tokens": output.metrics["tokens:sum"]}, codec.encode_forward_backward(output)),
        )

    def op_optim_step(self, fields: Fields, body: bytes) -> Reply:
        step = self._model(fields).optim_step(tinker.AdamParams(**fields["adam_params"]))
        return (step, lambda response: Frame({"json": {"metrics": response.metrics}}))

    def op_save_weights(self, fields: Fields, body: bytes) -> Reply:
        saved = self._model(fields).save_state(
            fields["name"], fields["ttl_seconds"], fields["overwrite"], fields["user_metadata"]
        )
        return (saved, lambda response: Frame({"json": {"type": "save_weights", "path": response.path}}))

    def op_save_weights_for_sampler(self, fields: Fields, body: bytes) -> Reply:
        kind = "save_weights_for_sampler"
        saved = self._model(fields).save_weights_for_sampler(
            fields["name"], fields["ttl_seconds"], fields["user_metadata"]
        )
        return (saved, lambda response: Frame({"json": {"type": kind, "path": response.path}}))

    def op_snapshot(self, fields: Fields, body: bytes) -> Reply:
        """A sampler of the weights as they are now, kept in memory as `sampler_id`."""
        snapshot = self._model(fields).save_weights_and_get_sampling_client()
        self._samplers[fields["sampler_id"]] = snapshot.future()
        reply = {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": fields["sampler_id"]}
        return (snapshot, lambda _: Frame({"json": reply}))

    def op_load_weights(self, fields: Fields, body: bytes) -> Reply:
        model, path = self._model(fields), fields["path"]
        load = model.load_state_with_optimizer if fields["optimizer"] else model.load_state
        reply = {"type": "load_weights", "path": path, "model_id": fields["model_id"]}
        return (load(path), lambda _: Frame({"json": reply}))

    def op_fail_step(self, fields: Fields, body: bytes) -> Reply:
        """A part of the next step is missing."""
        return self._model(fields).fail_step(fields["why"]), lambda _: Frame()

    def op_stats(self, fields: Fields, body: bytes) -> Reply:
        """What the samplers are doing and how long requests wait, as they are now."""
        samplers = {name: stats._asdict() for name, stats in self._engine.sampler_stats().items()}
        waits = {kind: wait._asdict() for kind, wait in self._engine.waits().items()}
        return completed(lambda: Frame({"samplers": samplers, "waits": waits})), lambda frame: frame

    def op_refuse(self, fields: Fields, body: bytes) -> Reply:
        raise RequestError(fields["why"])

    # Samplers

    def op_open_sampler(self, fields: Fields, body: bytes) -> Reply:
        """A sampler of a base model, or of the checkpoint `path`."""
        engine = self._engine
        if fields["path"] is None:
            name = fields["base_model"]
            client = engine.make_client(lambda: SamplingClient(engine, engine, engine.load(name), None))
        else:
            client = open_checkpoint(engine, engine, Path(fields["home"]), fields["path"])
        self._samplers[fields["sampler_id"]] = client.future()
        return (client, lambda _: Frame())

    def op_sample(self, fields: Fields, body: bytes) -> Reply:
        opened = self._samplers.get(fields["sampler_id"])
        if opened is None:
            raise RequestError(f"sampling session {fields['sampler_id']!r} is not loaded: its session has ended")
        arguments = codec.sample_arguments(json.loads(body))
        arguments["record_as"] = fields.get("record_as")
        arguments["origin"] = Origin(fields["tenant"], tuple(fields["prefixes"]))
        if fields.get("stream"):
            arguments["on_progress"] = Progress(partial(self._tell, fields["id"]))
        if opened.done():
            return opened.result().sample(**arguments), _sampled
        return _sample_when_open(opened, arguments), _sampled

    def op_drop(self, fields: Fields, body: bytes) -> Reply:
        """Forget models and samplers; their memory is free once nothing that runs needs it."""
        for model_id in fields["model_ids"]:
            self._models.pop(model_id, None)
        for sampler_id in fields["sampler_ids"]:
            self._samplers.pop(sampler_id, None)
        return completed(Frame), lambda frame: frame


def _sampled(response: tinker.types.SampleResponse) -> Frame:
    tokens = sum(len(sequence.tokens_np) for sequence in response.sequences if sequence.tokens_np is not None)
    return Frame({"tokens": tokens}, codec.encode_sample(response))


def _sample_when_open(
    opened: Future[SamplingClient], arguments: Mapping[str, Any]
) -> EngineFuture[tinker.types.SampleResponse]:
    """For a request that comes while its sampler is still being made."""
    response: Future[tinker.types.SampleResponse] = Future()

    def begin(done: Future[SamplingClient]) -> None:
        try:
            sampling = done.result().sample(**arguments).future()
        except Exception as error:
            response.set_exception(error)
        else:
            sampling.add_done_callback(lambda sampled: resolve(response, sampled.result))

    opened.add_done_callback(begin)
    return EngineFuture(response)
