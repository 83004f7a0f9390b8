"""A frozen model to query: an OpenAI-compatible endpoint, or weights behind a renderer."""

import chz

from tinker_cookbook.clients import ServiceClient
from tinker_cookbook.completers import MessageCompleter, TinkerMessageCompleter
from tinker_cookbook.endpoints import AskConfig
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils.fields import docs
from tinker_cookbook.weights_config import AskedWeights


@chz.chz(typecheck=True)
class AskedModel(AskedWeights, AskConfig, max_tokens=512):
    """Exactly one of an endpoint and weights."""

    DOCS = docs(weights="used instead of an endpoint, if named: a base model, or a checkpoint of one")

    async def open_completer(self, name: str, service: ServiceClient | None = None) -> MessageCompleter:
        """The model, called `name` in errors. `service` is the run's, as in WeightsConfig.open. Raises as `check`."""
        if not self._names_weights:
            return self.open_endpoint(name)
        policy = await self.weights.open_policy(f"{name}.weights", service)
        return TinkerMessageCompleter(
            policy.sampling_client, policy.renderer, self.max_tokens, temperature=self.temperature, seed=self.seed
        )

    @property
    def _names_weights(self) -> bool:
        return self.weights.base_model is not None or self.weights.load_checkpoint_path is not None

    def check(self, name: str, backend: str | None = None, base_url: str | None = None) -> None:
        """Raises ConfigurationError unless exactly one of the two is named and it is valid.

        Args:
            backend, base_url: those of the run, as in WeightsConfig.check.
        """
        if self.endpoint.is_named == self._names_weights:
            what = "endpoint and weights are both named" if self._names_weights else "no grader is named"
            raise ConfigurationError(
                f"{name}: {what}; give {name}.endpoint.base_url and {name}.endpoint.model, or {name}.weights.base_model"
            )
        if self._names_weights:
            self.weights.check(f"{name}.weights", backend, base_url)
        else:
            self.endpoint.check(f"{name}.endpoint")
