"""Weights in configs: a base model or a checkpoint, checked and opened in one place.

Every model that a run uses but does not train comes from here: the reference of a KL penalty or of DPO, a teacher, a
judge, a preference model, the answerer of a game, the policy of a chat or a benchmark. A checkpoint whose base
model is not the named one is rejected before any weights load.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import chz

from tinker_cookbook import backends
from tinker_cookbook.clients import SamplingClient, ServiceClient
from tinker_cookbook.data.shipped import shipped_model
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.field_groups import RendererKey, ServiceKeys
from tinker_cookbook.models import info as model_info
from tinker_cookbook.models.renderer import RENDERER_NAME_METADATA_KEY
from tinker_cookbook.plugins import full_reference
from tinker_cookbook.renderers import Renderer, get_renderer_of_model
from tinker_cookbook.utils.fields import FieldGroup, docs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """Weights for sampling, with the renderer and other objects needed to use them."""

    name: str
    """the checkpoint's path, or the base model"""
    sampling_client: SamplingClient
    renderer: Renderer
    renderer_name: str
    base_model: str
    context_length: int | None
    """in tokens; None: unknown"""


@dataclass(frozen=True)
class Origin:
    """The base model and renderer of some weights."""

    base_model: str
    renderer_name: str | None
    """the renderer that a checkpoint was trained with; None: a base model, or its run did not record one"""


def same_model(one: str, other: str) -> bool:
    """Whether two names mean the same base model. Hub ids are compared as strings, folders by location."""
    if one == other:
        return True
    folders = [Path(name).expanduser() for name in (one, other)]
    return all(folder.is_dir() for folder in folders) and folders[0].resolve() == folders[1].resolve()


async def find_origin(
    service: ServiceClient, path: str, base_model: str | None, renderer_name: str | None, name: str
) -> Origin:
    """Look up the base model and renderer of a checkpoint; nothing is loaded. A renderer other than the checkpoint's
    is logged.

    Args:
        path: the checkpoint (tinker://...).
        base_model: the base model that it must belong to; None: any.
        renderer_name: the renderer that will be used with it, if any.
        name: the user's name for these weights; errors begin with it.

    Raises:
        ConfigurationError: the checkpoint belongs to another base model.
    """
    try:
        run = await service.create_rest_client().get_training_run_by_tinker_path_async(path)
    except Exception as error:
        if base_model is None or not backends.is_engine_error(error):
            raise
        # Weights that others have published can be loaded, but their run cannot be looked up.
        logger.warning("%s: cannot see which base model %s belongs to (%s)", name, path, error)
        return Origin(base_model, None)
    if base_model is not None and not same_model(run.base_model, base_model):
        raise ConfigurationError(
            f"{name}: {path!r} is a checkpoint of {run.base_model!r}, not of {base_model!r}; "
            f"set the base model to {run.base_model!r}, or give a checkpoint of {base_model!r}"
        )
    recorded = (run.user_metadata or {}).get(RENDERER_NAME_METADATA_KEY)
    if renderer_name is not None and recorded not in (None, full_reference(renderer_name)):
        logger.warning(
            "%s: %s was trained with the renderer %s and is used with %s; set renderer_name=%s if that is not meant",
            name,
            path,
            recorded,
            renderer_name,
            recorded,
        )
    return Origin(base_model or run.base_model, recorded)


@chz.chz(typecheck=True)
class WeightsConfig(RendererKey, ServiceKeys):
    """Which weights to use, where they run, and the renderer for their messages.

    The methods take the user's name for these weights, such as `judge.weights`; errors begin with it.
    """

    DOCS = docs(backend="local, or tinker (hosted); None: as the run that opens them, else TINKER_BACKEND, else local")

    base_model: str | None = chz.field(
        default=None,
        doc="base model: a directory, a hub id, or tiny_chat (shipped); None: the checkpoint's",
        munger=lambda self, name: None if name is None else shipped_model(name),
    )
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="sampler weights on top of it (tinker://<run>/sampler_weights/<name>); None: the base model"
    )

    def check(self, name: str, backend: str | None = None, base_url: str | None = None) -> None:
        """Check everything that needs no request to a service.

        Args:
            backend, base_url: those of the run; used unless this config sets its own.

        Raises:
            ConfigurationError: no weights are named, the checkpoint has no sampler weights, no such model or backend.
        """
        self._check_named(name)
        if self._names_service:
            backend, base_url = self.backend, self.base_url
        backends.check_backend(backend, self.base_model, base_url, field=name)

    async def origin(self, name: str, service: ServiceClient | None = None) -> Origin:
        """The base model and renderer of the weights, without loading them. Raises as `check` and `find_origin`."""
        return (await self._find(name, service))[1]

    async def open(self, name: str, service: ServiceClient | None = None) -> SamplingClient:
        """Check the weights and load them.

        Args:
            service: the run's service, used unless this config sets its own; None: a new one.

        Raises:
            ConfigurationError: as in `check` and `find_origin`, before anything is loaded.
        """
        service, _ = await self._find(name, service)
        return await self._load(service)

    async def open_policy(self, name: str, service: ServiceClient | None = None) -> Policy:
        """Like `open`, with the renderer: the configured one, else the checkpoint's, else the base model's recommended
        one.
        """
        service, origin = await self._find(name, service)
        model = origin.base_model
        renderer_name = self.renderer_name or origin.renderer_name or model_info.get_recommended_renderer_name(model)
        renderer = get_renderer_of_model(renderer_name, model)
        client = await self._load(service)
        context = model_info.get_context_length(model)
        return Policy(self.load_checkpoint_path or model, client, renderer, renderer_name, model, context)

    @property
    def _names_service(self) -> bool:
        return self.backend is not None or self.base_url is not None

    def _check_named(self, name: str) -> None:
        path = self.load_checkpoint_path
        if path is None and self.base_model is None:
            raise ConfigurationError(f"{name}: no weights are named; give a base model, a checkpoint, or both")
        if path is not None and not (path.startswith("tinker://") and "/sampler_weights/" in path):
            raise ConfigurationError(
                f"{name}: {path!r} is not a path of sampler weights; give a checkpoint's sampler_path "
                "(tinker://<run>/sampler_weights/<name>), which checkpoints.jsonl lists"
            )

    async def _find(self, name: str, service: ServiceClient | None) -> tuple[ServiceClient, Origin]:
        """The service that has the weights, and their base model and renderer."""
        if service is None or self._names_service:
            self.check(name)
            service = backends.create_service_client(self.backend, self.base_url)
        else:
            self._check_named(name)
        if (path := self.load_checkpoint_path) is None:
            return service, Origin(str(self.base_model), None)
        return service, await find_origin(service, path, self.base_model, self.renderer_name, name)

    async def _load(self, service: ServiceClient) -> SamplingClient:
        if self.load_checkpoint_path is not None:
            return await service.create_sampling_client(model_path=self.load_checkpoint_path)
        return await service.create_sampling_client(base_model=self.base_model)


@chz.chz(typecheck=True)
class AskedWeights(FieldGroup):
    """Frozen weights to query."""

    weights: WeightsConfig = chz.field(default_factory=WeightsConfig, doc="the model to query")


@chz.chz(typecheck=True)
class Scorer(WeightsConfig):
    """Weights for scoring existing token ids, which need no renderer."""

    @chz.validate
    def _needs_no_renderer(self) -> None:
        if self.renderer_name is not None:
            raise ConfigurationError(
                f"renderer_name={self.renderer_name!r} of a {type(self).__name__}: it scores token ids and renders nothing; "
                "leave renderer_name out"
            )


@chz.chz(typecheck=True)
class ScorerConfig(Scorer):
    """A Scorer with a required base model."""

    base_model: str = chz.field(
        doc="base model: a directory, a hub id, or tiny_chat (shipped)", munger=lambda self, name: shipped_model(name)
    )
