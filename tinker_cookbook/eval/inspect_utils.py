"""inspect-ai's model for a sampling client, for scripts that create one themselves; the library uses `inspect_evaluators`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from tinker_cookbook import backends
from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.eval.inspect_evaluators import inspect_model, require_inspect, to_messages
from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.models import info as model_info
from tinker_cookbook.renderers import Message, get_renderer_of_model
from tinker_cookbook.weights_config import Policy

if TYPE_CHECKING:
    import tinker

DEFAULT_MAX_TOKENS = 2048
"""Longest reply if the task sets no limit: inspect's default."""


def InspectAPIFromTinkerSampling(
    renderer_name: str,
    model_name: str,
    model_path: str | None = None,
    sampling_client: SamplingClient | None = None,
    base_url: str | None = None,
) -> Any:
    """The inspect `ModelAPI` for a sampling client, or for the weights at `model_path`. Reasoning is kept in replies.

    Args:
        model_name: the base model, whose tokenizer and context are used.

    Raises:
        ConfigurationError: neither client nor path is given, or inspect-ai is not installed.
    """
    require_inspect()
    if sampling_client is None and model_path is None:
        raise ConfigurationError("model_path=None: give the path of sampler weights, or sampling_client")
    renderer = get_renderer_of_model(renderer_name, model_name)
    if sampling_client is None:
        service = backends.create_service_client(base_url=base_url)
        opened: Any = service.create_sampling_client(model_path=model_path)
        # The SDK returns a client, the local engine a future.
        sampling_client = cast(SamplingClient, opened.result() if hasattr(opened, "result") else opened)
    context = model_info.get_context_length(model_name)
    policy = Policy(model_name, sampling_client, renderer, renderer_name, model_name, context)
    return inspect_model(policy, DEFAULT_MAX_TOKENS).api


def convert_inspect_messages(messages: Sequence[Any]) -> list[Message]:
    """Convert inspect's chat messages to the renderers'. Raises ConfigurationError for content other than text and reasoning."""
    return to_messages(messages)


def get_model_usage(tokenized_prompt: Sequence[int], responses: Sequence[tinker.SampledSequence]) -> Any:
    """inspect's `ModelUsage` of a request: the prompt tokens, counted once, and the tokens of all its responses."""
    written = sum(len(response.tokens) for response in responses)
    prompt = len(tokenized_prompt)
    return require_inspect().model.ModelUsage(input_tokens=prompt, output_tokens=written, total_tokens=prompt + written)
