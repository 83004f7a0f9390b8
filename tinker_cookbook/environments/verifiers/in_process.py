"""A harness that calls the model from this process: a chat without tools, with no program to install and no network."""
# pyright: reportMissingImports=false

from typing import Any, cast

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["InProcessHarness"]


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    """One model call per segment, on the conversation so far. Tasks with tool servers need another harness."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        messages = [message_to_wire(message) for message in said]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        body: dict[str, Any] = {"model": ctx.model, "messages": messages}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            ) as response,
        ):
            if response.status != 200:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=await response.text())
            reply = cast("dict[str, Any]", await response.json())
        return vf.ProgramResult(exit_code=0, stdout=reply["choices"][0]["message"].get("content") or "", stderr="")
