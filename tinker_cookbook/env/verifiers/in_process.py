"""A harness that runs in this process: a chat with the task's tools, without an installed program or a network."""
# pyright: reportMissingImports=false

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["InProcessHarness"]


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    """Calls the model on the conversation so far, until a reply has no tool call. Calls are answered one after the
    other.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
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
        given = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        messages = [message_to_wire(message) for message in given]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools = _Tools(*await connect_mcp({"mcpServers": servers}, stack))
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
            body: dict[str, Any] = {"model": ctx.model, "messages": messages}
            if declared := tools.declared(self.config.disabled_tools or []):
                body["tools"] = declared
            while True:
                headers = {"Authorization": f"Bearer {secret}"}
                async with session.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
                    if response.status != 200:
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=await response.text())
                    reply: dict[str, Any] = (await response.json())["choices"][0]["message"]
                messages.append(reply)
                if not reply.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout=reply.get("content") or "", stderr="")
                messages += [await tools.answer(call) for call in reply["tool_calls"]]


class _Tools:
    """The tools of a task's servers, under the names that the policy uses."""

    def __init__(self, schemas: list[dict[str, Any]], origins: dict[str, tuple[str, str]], servers: dict[str, Any]):
        self._schemas, self._places, self._servers = schemas, origins, servers

    def declared(self, disabled: list[str]) -> list[dict[str, Any]]:
        for name in disabled:
            self._places.pop(name, None)
        return [schema for schema in self._schemas if schema["function"]["name"] in self._places]

    async def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        """The message that answers a call; for an invalid call it says why."""
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError as error:
            content: Any = f"error: the arguments are not valid JSON ({error})"
        else:
            if name not in self._places:
                content = f"error: unknown tool {name!r}"
            elif not isinstance(arguments, dict):
                content = f"error: the arguments must be a JSON object, not {type(arguments).__name__}"
            else:
                content = await call_mcp(self._servers, self._places, name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
