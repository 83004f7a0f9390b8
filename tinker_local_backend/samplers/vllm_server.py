"""The transport to an external vLLM server, over its OpenAI-compatible routes, with token ids in and out.

Adapters are loaded over its LoRA routes, so it must run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and be able to read the folder of
the adapters.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import httpx

from tinker_local_backend.samplers.adapters import AdapterFiles, expert_option
from tinker_local_backend.samplers.transport import Accepts, Delta, Died, Event, Failed, OnEvent, Ready, Request

MAX_CONNECTIONS = 256
"""One per running completion. Further completions are queued in the client."""

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""A server that is silent for this long counts as dead. This also bounds a request's time in the server's queue."""

CLOSE_SECONDS = 10.0

_ADAPTER_HINT = (
    "start the server with --enable-lora{}, --max-lora-rank of at least the adapter's rank, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "
    "and access to the folder (TINKER_LOCAL_HOME, on a shared file system)"
)

_KEY_HINT = "; set TINKER_LOCAL_VLLM_API_KEY to the key that the server was started with"


class _Refused(Exception):
    """The server responded with an error. `status` is the HTTP status, or 200 for an error within a stream."""

    def __init__(self, message: str, status: int = 200):
        super().__init__(message)
        self.status = status


class VllmServer:
    """A connection to a server, on a thread that runs an event loop. The server has its own limits on adapters."""

    def __init__(self, url: str, api_key: str | None, _accepts: Accepts, on_event: OnEvent):
        self._url, self._on_event = url, on_event
        self._closed = False
        self._model = ""
        self._tasks: dict[int | AdapterFiles, asyncio.Task[None]] = {}
        """completions by number, and unload tasks by adapter"""
        self._loading: dict[int, asyncio.Task[None]] = {}
        """load tasks by the adapter's number"""
        self._loop = asyncio.new_event_loop()
        # httpx logs every request at INFO, which would flood the log of a run.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
        )
        self._opened = self._loop.create_task(self._open())
        self._thread = threading.Thread(target=self._serve, name="tinker-local-vllm-server", daemon=True)
        self._thread.start()

    def start(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._call(self._begin, request.number, partial(self._run, request))

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._call(self._stop, number)

    def sleep(self) -> bool:
        return False  # a server does not share memory with training

    def unload(self, adapter: AdapterFiles) -> None:
        self._call(self._begin, adapter, partial(self._unload_now, adapter))

    def close(self) -> None:
        self._closed = True
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_SECONDS)
        self._call(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the loop

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _emit(self, event: Event) -> None:
        if not self._closed:
            self._on_event(event)

    def _died(self, why: str) -> None:
        self._emit(Died(f"the vLLM server at {self._url} {why}"))
        self._closed = True

    async def _open(self) -> None:
        try:
            served = (await self._ask("GET", "/v1/models"))["data"]
            base = next(model for model in served if not model.get("parent"))
            self._model = base["id"]
            version = (await self._ask("GET", "/version"))["version"]
            self._emit(Ready(version, base["max_model_len"]))
        except _Refused as error:
            self._died(f"refused the request: {error}{_KEY_HINT if error.status == 401 else ''}")
        except (httpx.HTTPError, LookupError, TypeError, ValueError, StopIteration) as error:
            self._died(_unreachable(error))

    def _begin(self, key: int | AdapterFiles, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks[key] = task = self._loop.create_task(run())
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _stop(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()  # closes its connection, which makes the server abort the request

    async def _run(self, request: Request) -> None:
        try:
            await asyncio.shield(self._opened)
            name = self._model
            if request.adapter is not None:
                name = request.adapter.name
                await asyncio.shield(self._load(request.adapter))
            async for delta in self._stream(request, name):
                self._emit([delta])
        except _Refused as error:
            self._emit(Failed(request.number, str(error)))
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            self._died(_unreachable(error))

    async def _stream(self, request: Request, name: str) -> AsyncIterator[Delta]:
        body = {
            "model": name,
            "prompt": request.prompt,
            "seed": request.seed & ((1 << 63) - 1),  # vLLM takes signed 64 bits, and -1 for no seed
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
            "min_p": request.min_p,
            "stop_token_ids": request.stop,
            "ignore_eos": True,
            "logprobs": request.topk,
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        if request.salt:
            body["cache_salt"] = request.salt
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            await _check(response)
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not data or data == "[DONE]" or not line.startswith("data:"):
                    continue
                message = json.loads(data)
                if "error" in message:
                    raise _Refused(str(message["error"].get("message", message["error"])))
                for choice in message["choices"]:
                    yield _delta(request, choice)

    def _load(self, adapter: AdapterFiles) -> asyncio.Task[None]:
        task = self._loading.get(adapter.number)
        if task is None or (task.done() and task.exception() is not None):
            self._loading[adapter.number] = task = self._loop.create_task(self._load_now(adapter))
        return task

    async def _load_now(self, adapter: AdapterFiles) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder), "is_3d_lora_weight": adapter.is_3d}
        try:
            await self._ask("POST", "/v1/load_lora_adapter", body)
        except _Refused as error:
            option = expert_option(adapter.layout)
            flag = f", --{option.replace('_', '-')}" if option else ""
            raise _Refused(f"adapter {adapter.folder} was not loaded: {error}; {_ADAPTER_HINT.format(flag)}") from None

    async def _unload_now(self, adapter: AdapterFiles) -> None:
        loading = self._loading.pop(adapter.number, None)
        with suppress(_Refused, httpx.HTTPError):  # it was never loaded, or the server has ended
            if loading is not None:
                await loading
                await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": adapter.name})

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = await self._client.request(method, path, json=body)
        await _check(response)
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    async def _close(self) -> None:
        for key, task in self._tasks.items():
            if isinstance(key, int):
                task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._client.aclose()


def _unreachable(error: Exception) -> str:
    return f"cannot be reached ({type(error).__name__}: {error})"


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = (await response.aread()).decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    raise _Refused(f"HTTP {response.status_code}: {text[:500]}", response.status_code)


def _delta(request: Request, choice: dict[str, Any]) -> Delta:
    logprobs = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    topk = None
    if request.topk:
        topk = [
            sorted(((int(name.partition(":")[2]), value) for name, value in table.items()), key=lambda pair: -pair[1])
            for table in logprobs["top_logprobs"]
        ]
    # NaN is not JSON: the server sends null, and the caller handles NaN.
    values = [float("nan") if value is None else value for value in logprobs["token_logprobs"]]
    return Delta(request.number, choice["token_ids"] or [], values, topk, 0, choice["finish_reason"])
