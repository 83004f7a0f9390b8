"""The process that runs vLLM, under the Python of vLLM's environment, which has none of this project's packages.

    python -P vllm_worker.py

Reads and writes lines of JSON. The first line has the arguments of vLLM's engine; the answer is {"ready": ...} or
{"fatal": text}. Then:

    {"op": "add", ...}
    {"op": "abort", "numbers"}
    {"op": "unload", "adapter"}
    {"op": "sleep"}

"add" has the fields of transport.Request, with null or [number, name, folder, is_3d_lora_weight] for `adapter`. Answers are
{"tokens": [[number, ids, logprobs, topk, cached, ended], ...]}, the tokens since each sample's last answer, and
{"failed": number, "error": text}. "sleep", for an engine made with enable_sleep_mode that has nothing to sample, is answered with
{"asleep": true} once GPU memory is free: weights and adapters are offloaded to the CPU, and the next "add" loads them back.
The process ends when its input ends.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

PACKAGE = "tinker_local_backend"

if PACKAGE not in sys.modules:
    # The sampling code is the engine's, but the package's __init__ needs packages that this environment lacks. This must be
    # module-level code, because processes that vLLM spawns run it again.
    shell = types.ModuleType(PACKAGE)
    shell.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules[PACKAGE] = shell

SAMPLING = f"{PACKAGE}.samplers.vllm_sampling"


class Worker:
    """Steps vLLM's engine in a loop, and handles commands between steps."""

    def __init__(self, arguments: dict[str, Any], answers: Any):
        vllm = importlib.import_module("vllm")
        importlib.import_module(SAMPLING)  # before the engine is made
        self._vllm = vllm
        self._lora_request = importlib.import_module("vllm.lora.request").LoRARequest
        self._delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._answers = answers
        engine_args = vllm.EngineArgs(
            **arguments,
            generation_config="vllm",
            enable_lora=True,
            logprobs_mode="processed_logprobs",
            max_logprobs=-1,
            async_scheduling=False,  # sampling needs the previous step's tokens
            worker_extension_cls=f"{SAMPLING}.WorkerExtension",
            disable_log_stats=True,
        )
        self._engine = vllm.LLMEngine.from_engine_args(engine_args)
        self._engine.engine_core.collective_rpc("use_our_sampling")
        self._loaded: set[int] = set()
        self._wanting_topk: set[int] = set()
        self._asleep = False
        self._unneeded: list[int] = []
        """adapters to remove after waking: while asleep they are in CPU memory"""
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        max_model_len = self._engine.vllm_config.model_config.max_model_len
        send(answers, ready={"version": vllm.__version__, "max_model_len": max_model_len})

    def serve(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            self._handle(self._commands.get())
            while self._engine.has_unfinished_requests():
                while not self._commands.empty():
                    self._handle(self._commands.get())
                self._report(self._engine.step())

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        os._exit(0)  # the parent has ended: abandon the current step

    def _handle(self, command: dict[str, Any]) -> None:
        if command["op"] == "abort":
            self._engine.abort_request([str(number) for number in command["numbers"]])
            self._wanting_topk.difference_update(command["numbers"])
        elif command["op"] == "sleep":
            if not self._asleep and not self._engine.has_unfinished_requests():
                self._engine.sleep(level=1)
                self._asleep = True
            send(self._answers, asleep=self._asleep)
        elif command["op"] == "unload":
            if self._asleep:
                self._unneeded.append(command["adapter"])
            elif command["adapter"] in self._loaded:
                self._loaded.remove(command["adapter"])
                self._engine.remove_lora(command["adapter"])
        else:
            try:
                self._wake()
                self._add(command)
            except (
                Exception
            ) as error:  # fails only this request, whose prompt is too long or whose adapter does not load
                send(self._answers, failed=command["number"], error=f"{type(error).__name__}: {error}")

    def _wake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False
            for adapter in self._unneeded:
                self._handle({"op": "unload", "adapter": adapter})
            self._unneeded.clear()

    def _add(self, command: dict[str, Any]) -> None:
        lora = None
        if command["adapter"] is not None:
            number, name, folder, is_3d = command["adapter"]
            lora = self._lora_request(name, number, folder, is_3d_lora_weight=is_3d)
            if number not in self._loaded:
                self._engine.add_lora(lora)  # here, so that an adapter that does not load fails only its own requests
                self._loaded.add(number)
        params = self._vllm.SamplingParams(
            temperature=command["temperature"],
            top_k=command["top_k"],
            top_p=command["top_p"],
            extra_args={"seed": command["seed"], "min_p": command["min_p"]},  # for vllm_sampling.py
            max_tokens=command["max_tokens"],
            stop_token_ids=command["stop"],
            ignore_eos=True,
            logprobs=command["topk"],
            detokenize=False,
            output_kind=self._delta,
        )
        prompt = {"prompt_token_ids": command["prompt"]}
        if command["salt"]:
            prompt["cache_salt"] = command["salt"]
        self._engine.add_request(str(command["number"]), prompt, params, lora_request=lora)
        if command["topk"]:
            self._wanting_topk.add(command["number"])

    def _report(self, outputs: list[Any]) -> None:
        rows = []
        for output in outputs:
            (delta,) = output.outputs
            number = int(output.request_id)
            tokens = list(delta.token_ids)
            tables = delta.logprobs or []
            logprobs = [table[token].logprob for token, table in zip(tokens, tables, strict=True)]
            topk = [_most_likely(table) for table in tables] if number in self._wanting_topk else None
            if delta.finish_reason is not None:
                self._wanting_topk.discard(number)
            rows.append([number, tokens, logprobs, topk, output.num_cached_tokens or 0, delta.finish_reason])
        if rows:
            send(self._answers, tokens=rows)


def send(answers: Any, **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


def _most_likely(table: dict[int, Any]) -> list[tuple[int, float]]:
    """Token ids and logprobs, most likely first; one extra if the sampled token is not among the top k."""
    return sorted(((token, entry.logprob) for token, entry in table.items()), key=lambda pair: -pair[1])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's prints go to the log
    arguments = json.loads(sys.stdin.readline())
    try:
        worker = Worker(arguments, answers)
    except Exception as error:
        traceback.print_exc()
        send(answers, fatal=f"{type(error).__name__}: {error}")
        os._exit(1)
    worker.serve()


if __name__ == "__main__":
    main()
