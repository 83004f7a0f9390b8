"""A plain chat with a policy; `python -m recipes.chat` also has commands, logprobs and seeds.

python -m tinker_cookbook.chat_app.tinker_chat_cli base_model=Qwen/Qwen3-8B model_path=tinker://.../sampler_weights/final
"""

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.clients import SamplingClient
from tinker_cookbook.field_groups import CheckpointKey, LongestReply, ServiceKeys, Temperature, TopP
from tinker_cookbook.renderers import Message, Renderer, format_content_as_string
from tinker_cookbook.utils.fields import fill
from tinker_cookbook.utils.lazy import tinker
from tinker_cookbook.weights_config import WeightsConfig


@chz.chz
class Config(CheckpointKey, LongestReply, Temperature, TopP, ServiceKeys, temperature=0.7, top_p=0.9):
    """The policy to talk to, and how its replies are sampled."""

    base_model: str = chz.field(default="Qwen/Qwen3.5-9B-Base", doc="the model, if model_path is not given")


class ChatSession:
    """A conversation and its sampling settings."""

    def __init__(
        self, sampling_client: SamplingClient, renderer: Renderer, max_tokens: int, temperature: float, top_p: float
    ) -> None:
        self.sampling_client, self.renderer = sampling_client, renderer
        self.max_tokens, self.temperature, self.top_p = max_tokens, temperature, top_p
        self.conversation_history: list[Message] = []

    def add_user_message(self, content: str) -> None:
        self.conversation_history.append({"role": "user", "content": content})

    def add_assistant_message(self, content: str) -> None:
        self.conversation_history.append({"role": "assistant", "content": content})

    def clear_history(self) -> None:
        """Start a new conversation."""
        self.conversation_history.clear()

    async def generate_response(self) -> str:
        """Sample the policy's reply, add it to the conversation, and return the displayed text."""
        params = tinker.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.renderer.get_stop_sequences(),
        )
        prompt = self.renderer.build_generation_prompt(self.conversation_history)
        response = await self.sampling_client.sample(prompt, 1, params)
        reply, _ = self.renderer.parse_response(list(response.sequences[0].tokens))
        # Unmodified: the renderer renders or drops the reasoning of earlier turns, as its model expects.
        self.conversation_history.append(reply)
        return format_content_as_string(reply["content"], separator="\n--------\n")


async def main(config: Config) -> None:
    """Read lines until `quit`, `exit` or the end of input; `n` begins a new conversation."""
    weights = fill(WeightsConfig, config, load_checkpoint_path=config.model_path)
    policy = await weights.open_policy("model_path" if config.model_path is not None else "base_model")
    session = ChatSession(policy.sampling_client, policy.renderer, config.max_tokens, config.temperature, config.top_p)
    print("Type quit to leave, n for a new conversation.")
    while True:
        try:
            line = input("User: ").strip()
        except EOFError:
            return
        if line.lower() in ("quit", "exit", "q"):
            return
        if line.lower() == "n":
            session.clear_history()
        elif line:
            session.add_user_message(line)
            print(f"Assistant: {await session.generate_response()}\n")


if __name__ == "__main__":
    run_recipe(Config, main)
