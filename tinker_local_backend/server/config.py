"""Keys of `python -m tinker_local_backend.server`, checked before anything is loaded."""

import ipaddress
import os
from pathlib import Path
from typing import Any

import chz

from tinker_local_backend import environment
from tinker_local_backend.engine.model.refusals import check_model_name
from tinker_local_backend.errors import RequestError
from tinker_local_backend.shipped import shipped_model
from tinker_local_backend.storage.paths import local_home

MIB = 1 << 20


def _positive(config: object, name: str) -> None:
    """Validator: None or above 0."""
    if getattr(config, name) is not None:
        chz.validators.gt(0)(config, name)


def _limit(default: float | None, doc: str) -> Any:
    return chz.field(default=default, doc=doc, validator=_positive)


@chz.chz(typecheck=True)
class ServerConfig:
    """Models, address, access and limits of a server."""

    model: str | None = chz.field(
        default=None,
        doc="base model: a directory or a Hugging Face id; default without `models`: TINKER_DEBATE_BASE_MODEL",
    )
    models: str | None = chz.field(default=None, doc="several base models, separated by commas, instead of `model`")
    host: str = chz.field(default="127.0.0.1", doc="address to bind; other than loopback needs API keys")
    port: int = chz.field(default=8000, doc="port to bind; 0 takes a free one", validator=chz.validators.ge(0))
    home: str | None = chz.field(default=None, doc="where checkpoints live; default: TINKER_LOCAL_HOME")
    api_keys_file: str | None = chz.field(
        default=None,
        doc="file with a line `tenant=tml-...` per tenant; default: TINKER_LOCAL_API_KEYS, separated by commas",
    )
    tls_certfile: str | None = chz.field(default=None, doc="certificate (PEM): serve https")
    tls_keyfile: str | None = chz.field(default=None, doc="private key (PEM) of the certificate")
    access_log: str | None = chz.field(
        default=None,
        doc="file to append a JSON line to per request and operation, without keys; -: standard output; default: none",
    )

    chat: str = chz.field(
        default="renderer",
        doc="how chats become tokens: renderer (that of a checkpoint's training, else the one that recipes choose for the model; "
        "if none is known, the template), template (the tokenizer's chat template), or a renderer's name, for all models",
    )
    share_prefixes: bool = chz.field(
        default=False,
        doc="let all tenants share cached prompts: faster for one team, but timing reveals what others sent",
    )
    max_body_mib: int = _limit(64, "largest request body")
    max_decompressed_mib: int = _limit(256, "largest request body after decompression")
    max_json_mib: int = _limit(16, "largest request body that is JSON, after decompression")
    max_text_kib: int = _limit(1024, "text in a request in units of 1,024 characters, all prompts together")
    max_text_requests: int = _limit(256, "requests of a tenant that wait for the tokenizer; above it, 429")
    max_waiting_mib: int | None = _limit(
        None,
        "memory of a tenant's waiting requests and their possible results; above it, 429; default: half of "
        "max_waiting_total_mib if there are several keys, else all",
    )
    max_waiting_total_mib: int | None = _limit(None, "the sum over tenants; default: a quarter of the machine's memory")
    max_connections: int = _limit(10000, "open connections")
    max_tenant_requests: int = _limit(
        5000,
        "unanswered requests of a tenant, including long polls; set it below max_connections, or one tenant can use them all",
    )
    max_sessions: int = _limit(100, "live sessions of a tenant")
    max_models: int = _limit(32, "adapters that a tenant trains at a time")
    max_adapters_mib: int | None = _limit(
        None,
        "memory of all adapters, trained and sampled from; default: half of the free memory of the GPU, or a quarter of "
        "the machine's",
    )
    max_tenant_adapters_mib: int | None = _limit(
        None, "the same of one tenant; default: half of max_adapters_mib if there are several keys, else all"
    )
    max_rank: int = _limit(512, "largest LoRA rank")
    max_sequence_tokens: int | None = _limit(
        None, "longest sequence in training and sampling, prompt and completion together; default: the model's context"
    )
    max_snapshots: int = _limit(64, "sampling snapshots of a session; above it, the least recently used is evicted")
    max_sampling_requests: int = _limit(4096, "waiting or running sampling requests of a tenant; above it, 429")
    max_sampling_tokens: int = _limit(1 << 26, "tokens of a tenant's unfinished prompts and samples; above it, 429")
    max_training_requests: int = _limit(1024, "waiting or running requests of one trained model")
    max_results_mib: int = _limit(1024, "results kept for a tenant; above it, the oldest are dropped")

    session_timeout_seconds: float = _limit(300.0, "a session ends after this time without a heartbeat")
    silent_seconds: float = chz.field(
        default=30.0,
        doc="a session ends after this time without a heartbeat if max_sessions or max_models leaves no room for a new one; the "
        "SDK sends a heartbeat every 10",
        validator=chz.validators.gt(10),
    )
    request_gap_seconds: float = _limit(330.0, "how long a request waits for a missing earlier one of its model")
    poll_seconds: float = _limit(30.0, "how long a poll for a result may take; clients give up at 45")
    result_seconds: float = _limit(120.0, "how long a fetched result can be fetched again")
    body_seconds: float = _limit(60.0, "how long a client may take to send a request")
    shutdown_seconds: float = chz.field(
        default=30.0, doc="how long queued requests may still run after SIGTERM", validator=chz.validators.ge(0)
    )
    fetch_seconds: float = chz.field(
        default=10.0,
        doc="how long results are kept after that for live clients that have not fetched them",
        validator=chz.validators.ge(0),
    )

    @property
    def model_names(self) -> list[str]:
        if self.model is not None:
            names = [self.model]
        elif self.models is not None:
            names = self.models.split(",")
        else:
            names = [environment.read("TINKER_DEBATE_BASE_MODEL") or ""]
        return [shipped_model(name.strip()) for name in names if name.strip()]

    @property
    def home_path(self) -> Path:
        return Path(self.home).expanduser() if self.home else local_home()

    @property
    def scheme(self) -> str:
        return "https" if self.tls_certfile else "http"


def check_config(config: ServerConfig, has_keys: bool) -> None:
    """Raise RequestError or ModelLoadError, naming the key, the value and the fix."""
    both = config.model is not None and config.models is not None
    if both or (config.models is None and not config.model_names):
        raise RequestError("give model=NAME or models=A,B (one of the two): the base models to serve")
    if not config.model_names:
        raise RequestError(f"models={config.models!r} names no model")
    if len(set(config.model_names)) != len(config.model_names):
        raise RequestError(f"models={config.models!r} names a model twice")
    for name in config.model_names:
        check_model_name(name)
        if ":" in name:
            raise RequestError(f"model {name!r}: the SDK cuts a model's name at ':'; use a path without one")
        if name.startswith(("/", "~")) and name.count("/") == 2:
            raise RequestError(
                f"model {name!r}: the SDK reads a name with two slashes as organisation/model/variant and loads the "
                "tokenizer of the first two parts; move or link the folder one level deeper"
            )
    if config.port > 65535:
        raise RequestError(f"port={config.port} is above 65535")
    if (config.tls_certfile is None) != (config.tls_keyfile is None):
        raise RequestError("tls_certfile and tls_keyfile go together; give both or neither")
    for key in ("tls_certfile", "tls_keyfile"):
        file = getattr(config, key)
        if file is not None and not os.path.isfile(file):
            raise RequestError(f"{key}={file!r} is not a file")
    if not (has_keys or is_loopback(config.host)):
        raise RequestError(
            f"host={config.host!r} admits other machines, and there are no API keys: set api_keys_file or "
            "TINKER_LOCAL_API_KEYS, or bind 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
