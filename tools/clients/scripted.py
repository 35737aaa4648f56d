"""The real server over an engine that follows a script: what a model that chooses tools well would write.

    python -m tools.clients.scripted MODEL_FOLDER PORT

It calls the tools of the prompt, one a turn, in their order, with arguments made from their schemas; when each has
answered, it gives a text with the last answer in it. Without tools it repeats what the user said. The texts are in the
Hermes form, so the server's own parser reads them; tokens are the model's.
"""

from __future__ import annotations

import asyncio
import json
import operator
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.tokenizer import Tokenizer
from headrace.server.serve import serve
from headrace.types import Delta, Metrics, SamplingParams
from tests.support.fake_engine import FakeCapacity, FakeEngine

TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
ANSWER = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
USER = re.compile(r"<\|user\|>(.*?)<\|end\|>", re.DOTALL)
SAMPLES = {"string": "Paris", "integer": 3, "number": 1.5, "boolean": True, "null": None}


def written(prompt: str) -> str:
    """The script's answer to a rendered conversation."""
    listed = TOOLS.search(prompt)
    tools = [json.loads(line)["function"] for line in listed[1].split("\n") if line.strip()] if listed else []
    said = list(USER.finditer(prompt))
    asked = max((i for i, turn in enumerate(said) if "<tool_response>" not in turn[1]), default=0)
    answers = [found for turn in said[asked:] for found in ANSWER.findall(turn[1])]
    if len(answers) < len(tools):
        tool = tools[len(answers)]
        call = {"name": tool["name"], "arguments": sample(tool.get("parameters") or {}, tool.get("parameters") or {})}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    if answers:
        return f"The tool said: {answers[-1]}"
    return f"You said: {said[-1][1]}" if said else "Nothing was said."


def sample(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A value that fits a schema of the plain kinds that clients make of functions and classes."""
    if "$ref" in schema:
        return sample(reduce(operator.getitem, schema["$ref"].removeprefix("#/").split("/"), root), root)
    for word in ("const", "default"):
        if word in schema:
            return schema[word]
    if "enum" in schema:
        return schema["enum"][0]
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return sample(schema[word][0], root)
    kind = schema.get("type", "object")
    if kind == "object":
        wanted = schema.get("required", list(schema.get("properties", {})))
        return {name: sample(schema["properties"][name], root) for name in wanted}
    if kind == "array":
        return [sample(schema.get("items", {"type": "string"}), root)]
    return SAMPLES[kind[0] if isinstance(kind, list) else kind]


@dataclass(frozen=True)
class ScriptedCapacity(FakeCapacity):
    max_model_len: int = 16_384
    kv_cache_tokens: int = 131_072
    vocab_size: int = 2304
    model: str = "scripted"


class ScriptedEngine(FakeEngine):
    """Answers to token ids of a conversation with the script's text, a token a delta."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.tokenizer: Any = Tokenizer(config.model.folder)
        self.capacity = ScriptedCapacity()

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> SamplingParams:
        return params if params.max_tokens else replace(params, max_tokens=4096)

    async def generate(
        self, prompt: str | list[int], params: SamplingParams, *, request_id: str | None = None, **_: Any
    ) -> AsyncIterator[Delta]:
        arrival, tokenizer = time.monotonic(), self.tokenizer
        ids = tokenizer.encode(written(tokenizer.decode(prompt, skip_special_tokens=False)), add_special_tokens=False)
        most, sent, stopped = params.max_tokens or 4096, "", None
        for number in range(1, len(ids) + 1):
            await asyncio.sleep(0)
            text = tokenizer.decode(ids[:number])
            text = sent if text.endswith("\N{REPLACEMENT CHARACTER}") else text
            stopped = next((stop for stop in params.stop if stop in text), None)
            text = text.partition(stopped)[0] if stopped else text
            reason = "stop" if stopped or number == len(ids) else "length" if number == most else None
            delta = Delta(request_id or "", 0, token_ids=[ids[number - 1]], text=text[len(sent) :])
            delta.finish_reason, delta.stop_reason, sent = reason, stopped, max(sent, text, key=len)
            if reason:
                now = time.monotonic() - arrival
                delta.metrics = Metrics(now, now, 0.0, len(prompt), 0, number, "", "")
            yield delta
            if reason:
                return


def main() -> int:
    folder, port = sys.argv[1:]
    config = EngineConfig(model=folder, port=int(port), served_model_name="tiny")

    async def make() -> ScriptedEngine:
        return ScriptedEngine(config)

    return serve(config, make)


if __name__ == "__main__":
    sys.exit(main())
