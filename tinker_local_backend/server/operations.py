"""What the engine's process can be asked to do: one method per operation, from a frame to a future of a reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import tinker

from tinker_local_backend.engine.engine import Engine
from tinker_local_backend.engine.model.lora_spec import LoraSpec
from tinker_local_backend.engine.sampling.requests import Origin
from tinker_local_backend.engine.sampling.sampler import SampledSequence
from tinker_local_backend.engine.training.datums import OwnedData
from tinker_local_backend.errors import RequestError
from tinker_local_backend.futures import EngineFuture, completed, resolve
from tinker_local_backend.sampling_client import SamplingClient, open_checkpoint
from tinker_local_backend.server.schemas import LoraConfig
from tinker_local_backend.storage.catalog import read_info
from tinker_local_backend.storage.paths import CheckpointPath
from tinker_local_backend.storage.registry import Registry, Run, Session
from tinker_local_backend.training_client import Pass, TrainingClient, TrainingRun, load_checkpoint
from tinker_local_backend.wire import codec
from tinker_local_backend.wire.frames import Frame

Asked = Mapping[str, Any]
"""Fields of a frame: those of the SDK's request (schemas.py), and `home`, `tenant` and so on; with the frame's `body`."""
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
        return OPERATIONS[frame.fields["op"]](self, {**frame.fields, "body": frame.body})

    # Models

    def create_model(self, asked: Asked) -> Reply:
        lora = LoraConfig(**asked["lora_config"])
        return self._make_model(asked, asked["base_model"], lora.spec, lora.seed, {}, lambda run: None)

    def load_model(self, asked: Asked) -> Reply:
        """A new adapter from a checkpoint."""
        path = CheckpointPath.parse(asked["path"])
        info = read_info(Path(asked["home"]), path, asked["base_model"])
        load = partial(load_checkpoint, path=path, with_optimizer=asked["optimizer"])
        return self._make_model(asked, info.base_model, info.spec, 0, info.user_metadata, load)

    def _make_model(
        self,
        asked: Asked,
        base_model: str,
        spec: LoraSpec,
        seed: int | None,
        metadata: Mapping[str, str],
        load: Callable[[TrainingRun], None],
    ) -> Reply:
        engine, registry, session = self._engine, Registry(Path(asked["home"])), Session(**asked["session"])
        metadata = {**metadata, **(asked["user_metadata"] or {})}
        entry = Run(asked["model_id"], session.session_id, base_model, spec, metadata)

        def make() -> TrainingClient:
            number = engine.random_seed() if seed is None else seed
            run = TrainingRun.create(engine, registry, session, entry, number, tenant=asked["tenant"])
            load(run)
            run.record(has_saved=False)
            return TrainingClient(run, engine)

        def keep(client: TrainingClient) -> Frame:
            self._models[asked["model_id"]] = client
            info = client.get_info()
            model = {"base_model": info.model_data.model_name, "arch": info.model_data.arch}
            return Frame({**model, "rank": info.lora_rank, "execution": info.execution})

        return engine.make_client(make), keep

    def _model(self, asked: Asked) -> TrainingClient:
        model = self._models.get(asked["model_id"])
        if model is None:
            raise RequestError(f"model {asked['model_id']!r} is not loaded: its session has ended")
        return model

    def forward_backward(self, asked: Asked) -> Reply:
        body, size = asked["body"], asked["decompressed"]

        def read() -> Pass:
            """When its turn has come: what waits is as small as it came."""
            message = codec.parse_forward_backward(body if size is None else codec.decompress(body, size))
            return OwnedData(codec.datums(message)), message.loss_fn, codec.loss_config(message)

        return (
            self._model(asked).pass_over(read, not asked["forward_only"], asked["tokens"]),
            lambda output: Frame({"tokens": output.metrics["tokens:sum"]}, codec.encode_forward_backward(output)),
        )

    def optim_step(self, asked: Asked) -> Reply:
        step = self._model(asked).optim_step(tinker.AdamParams(**asked["adam_params"]))
        return step, lambda response: _json(metrics=response.metrics)

    def save_weights(self, asked: Asked) -> Reply:
        saved = self._model(asked).save_state(
            asked["path"], asked["ttl_seconds"], asked["overwrite"], asked["user_metadata"]
        )
        return saved, lambda response: _json(type="save_weights", path=response.path)

    def save_weights_for_sampler(self, asked: Asked) -> Reply:
        saved = self._model(asked).save_weights_for_sampler(asked["path"], asked["ttl_seconds"], asked["user_metadata"])
        return saved, lambda response: _json(type="save_weights_for_sampler", path=response.path)

    def snapshot(self, asked: Asked) -> Reply:
        """A sampler of the weights as they are now, kept in memory as `sampler_id`."""
        snapshot, sampler_id = self._model(asked).save_weights_and_get_sampling_client(), asked["sampler_id"]
        self._samplers[sampler_id] = snapshot.future()
        return snapshot, lambda _: _json(type="save_weights_for_sampler", path=None, sampling_session_id=sampler_id)

    def load_weights(self, asked: Asked) -> Reply:
        model, path = self._model(asked), asked["path"]
        load = model.load_state_with_optimizer if asked["optimizer"] else model.load_state
        return load(path), lambda _: _json(type="load_weights", path=path, model_id=asked["model_id"])

    def fail_step(self, asked: Asked) -> Reply:
        """A part of the next step is missing."""
        return self._model(asked).fail_step(asked["why"]), lambda _: Frame()

    def refuse(self, asked: Asked) -> Reply:
        raise RequestError(asked["why"])

    # Samplers

    def open_sampler(self, asked: Asked) -> Reply:
        """A sampler of a base model, or of the checkpoint `path`."""
        engine = self._engine
        if asked["path"] is None:
            name = asked["base_model"]
            client = engine.make_client(lambda: SamplingClient(engine, engine, engine.load(name), None))
        else:
            client = open_checkpoint(engine, engine, Path(asked["home"]), asked["path"])
        self._samplers[asked["sampler_id"]] = client.future()
        return client, lambda _: Frame()

    def sample(self, asked: Asked) -> Reply:
        opened = self._samplers.get(asked["sampler_id"])
        if opened is None:
            raise RequestError(f"sampling session {asked['sampler_id']!r} is not loaded: its session has ended")
        arguments = codec.sample_arguments(json.loads(asked["body"]))
        arguments["record_as"] = asked.get("record_as")
        arguments["origin"] = Origin(asked["tenant"], tuple(asked["prefixes"]))
        if asked.get("stream"):
            arguments["on_progress"] = Progress(partial(self._tell, asked["id"]))
        if opened.done():
            return opened.result().sample(**arguments), _sampled
        response: Future[tinker.types.SampleResponse] = Future()

        def begin(done: Future[SamplingClient]) -> None:
            """It came while its sampler was still being made."""
            try:
                sampling = done.result().sample(**arguments).future()
            except Exception as error:
                response.set_exception(error)
            else:
                sampling.add_done_callback(lambda sampled: resolve(response, sampled.result))

        opened.add_done_callback(begin)
        return EngineFuture(response), _sampled

    def drop(self, asked: Asked) -> Reply:
        """Forget models and samplers; their memory is free once nothing that runs needs it."""
        for model_id in asked["model_ids"]:
            self._models.pop(model_id, None)
        for sampler_id in asked["sampler_ids"]:
            self._samplers.pop(sampler_id, None)
        return completed(Frame), lambda frame: frame

    def stats(self, asked: Asked) -> Reply:
        """What the samplers are doing and how long requests wait, as they are now."""
        samplers = {name: stats._asdict() for name, stats in self._engine.sampler_stats().items()}
        waits = {kind: wait._asdict() for kind, wait in self._engine.waits().items()}
        return completed(lambda: Frame({"samplers": samplers, "waits": waits})), lambda frame: frame


OPERATIONS: dict[str, Callable[[Operations, Asked], Reply]] = {
    name: operation for name, operation in vars(Operations).items() if not name.startswith("_") and name != "run"
}


class Progress:
    """What is new of a sample that is being drawn: tells each token of each sample once, also when the sample begins again and
    draws it a second time."""

    def __init__(self, tell: Callable[[Frame], None]):
        self._tell = tell
        self._sent: dict[int, int] = {}

    def __call__(self, sequences: Sequence[SampledSequence]) -> None:
        news: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            sent = self._sent.get(index, 0)
            if len(sequence.tokens) > sent:
                self._sent[index] = len(sequence.tokens)
                topk = [[ids.tolist(), logprobs.tolist()] for ids, logprobs in sequence.topk[sent:]]
                tokens, logprobs = sequence.tokens[sent:], sequence.logprobs[sent:].tolist()
                news.append({"index": index, "tokens": tokens, "logprobs": logprobs, "topk": topk})
        if news:
            self._tell(Frame({"progress": news}))


def _json(**fields: Any) -> Frame:
    return Frame({"json": fields})


def _sampled(response: tinker.types.SampleResponse) -> Frame:
    tokens = sum(len(sequence.tokens_np) for sequence in response.sequences if sequence.tokens_np is not None)
    return Frame({"tokens": tokens}, codec.encode_sample(response))
