"""What the server says once it is ready: model, kernels, KV cache, tiers, ranks, URL, a first request to copy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.config import EngineConfig, KVStreaming
from headrace.config.environment import from_home
from headrace.config.tiers import NO_DISK
from headrace.logs import fields
from headrace.offload.tiers import own_disk
from headrace.progress import sized

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to listen on that nobody connects to -> the same on this machine."""


class Line(NamedTuple):
    """A line of the log, and what a machine reads of it."""

    text: str
    fields: Mapping[str, Any] = MappingProxyType({})

    @property
    def extra(self) -> dict[str, Any]:
        return fields(**self.fields)


def address(config: EngineConfig) -> str:
    """Where the server listens."""
    return _url(config.server.host, config.server.port)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def local_address(config: EngineConfig) -> str:
    """Where a client on this machine finds it."""
    host = config.server.host
    return _url(WILDCARDS.get(host, host), config.server.port)


def start_lines(
    capacity: Any, config: EngineConfig, model: str, weights: int, public: Sequence[str] = ()
) -> list[Line]:
    """The engine that has been loaded. weights: bytes of them; public: what all salts share (PublicPrefixes.lines)."""
    return [
        _model(capacity, model, weights),
        *_labelled("kernels", kernel_lines(capacity.kernels), kernels=capacity.kernels, backend=capacity.backend),
        *_labelled("adapters", adapter_lines(config), adapters=list(config.adapters.names)),
        *_labelled("experts", [capacity.experts] if capacity.experts else [], experts=capacity.experts),
        _kv_cache(capacity),
        *_labelled("tiers" if config.streaming is None else "KV", tier_lines(capacity, config)),
        *_labelled("public", public),
        *_labelled("ranks", [capacity.ranks] if capacity.ranks else [], ranks=capacity.ranks),
    ]


def _labelled(label: str, texts: Sequence[str], **told: Any) -> Iterator[Line]:
    for index, text in enumerate(texts):
        yield Line(f"{label if index == 0 else '':9} {text}", told if index == 0 else {})


def _model(capacity: Any, model: str, weights: int) -> Line:
    family = capacity.architecture.removesuffix("ForCausalLM").lower()
    kind = f" ({family}, {capacity.layers} layers)" if family else ""
    kept = f", kept as {capacity.quantization}" if capacity.quantization != "none" else ""
    size = f", {sized(weights)} of weights{kept}" if weights else ""
    told = {"model": model, "architecture": capacity.architecture, "dtype": capacity.dtype, "weight_bytes": weights}
    return Line(f"{'model':9} {model}{kind}, {capacity.dtype}{size}", told)


def adapter_lines(config: EngineConfig) -> list[str]:
    """Their names, and where they are."""
    return [f"{name}, {from_home(Path(folder))}" for name, folder in config.adapters.each]


def kernel_lines(kernels: dict[str, str]) -> list[str]:
    """One line if all operations have kernels of one kind, else one for each kind, the most common first.

    A layer that is computed one operation at a time has no kernels of its own.
    """
    kinds: dict[str, dict[str, str]] = {}
    for operation, told in kernels.items():
        kind, _, reason = told.partition(": ")
        if kind != "ops":
            kinds.setdefault(kind, {})[operation] = reason or kind
    by_count = sorted(kinds.items(), key=lambda item: -len(item[1]))
    return [_kind_line(kind, found, len(kinds) == 1) for kind, found in by_count]


def _kind_line(kind: str, found: dict[str, str], alone: bool) -> str:
    shortest = min(found.values(), key=len)
    named = shortest if shortest.startswith("C++") else kind if shortest == kind else f"{kind} ({shortest})"
    return f"{named} for {'all operations' if alone else ', '.join(found)}"


def _kv_cache(capacity: Any) -> Line:
    tokens, each, length = capacity.kv_cache_tokens, capacity.kv_bytes_per_token, capacity.max_model_len
    held = tokens / length
    count = f"{held:.1f}" if held < 10 and tokens % length else f"{held:,.0f}"
    text = (
        f"{tokens:,} tokens, {sized(tokens * each)} ({each:,} bytes a token, {capacity.kv_cache_dtype}): "
        f"{count} sequence{'s' * (count != '1')} of {length:,} tokens, unshared"
    )
    return Line(f"{'KV cache':9} {text}", {
        "kv_cache_tokens": tokens, "kv_bytes_per_token": each, "kv_cache_dtype": capacity.kv_cache_dtype,
        "max_model_len": length, "max_sequences": capacity.max_sequences,
    })  # fmt: skip


BYTES_PER_ELEMENT = {"int8": 1.0625, "int4": 0.5625}
"""About, with the scales; raw: as in the pool."""


def tier_lines(capacity: Any, config: EngineConfig) -> list[str]:
    """Where KV is kept below the pool, how much of it and in which format; passwords are left out.

    Of several ranks each has its own host memory; a token's bytes are those of a tensor rank."""
    if config.streaming is not None:
        return [_streamed_line(config.streaming)]
    if config.tiers is None:
        return []
    element = {"bfloat16": 2.0, "float32": 4.0}.get(capacity.kv_cache_dtype, 1.0625)
    stored = capacity.kv_bytes_per_token
    lines = []
    for tier in config.tiers.each:
        each = BYTES_PER_ELEMENT.get(tier.format, element)
        places = 1 / config.ranks.tensor if tier.outlives else config.ranks.context
        tokens = places * tier.size * 2**30 / stored * element / each
        a_rank = "" if tier.outlives or config.ranks.count == 1 else " a rank"
        size = f"{tier.size:g} GiB{a_rank}, about {tokens:,.0f} tokens" if tier.size else "as much as its server keeps"
        form = f", stored as {tier.format}"
        if own_disk.is_own(tier.place):
            form = form if tier.format != "raw" else ""
            lines.append(f"disk {from_home(Path(tier.place))}: {size}{form}; off by --kv-offload-path {NO_DISK}")
        else:
            lines.append(f"{tier.label}{' ' + tier.place if tier.place else ''}: {size}{form}")
    return lines


def _streamed_line(asked: KVStreaming) -> str:
    where = "host memory" if asked.path is None else f"a file in {asked.path}"
    weights = "; the weights too" if asked.weights else ""
    _, gib = asked.room
    return f"in {where}, {gib:g} GiB, streamed at each step, schedule {asked.schedule}{weights}"


def ready_lines(config: EngineConfig, model: str, tokenizer: Any, seconds: float, capacity: Any = None) -> list[Line]:
    """The URL and a request to copy. seconds: since the process started."""
    url = local_address(config) + "/v1"
    everywhere = " (on all interfaces)" if config.server.host in WILDCARDS else ""
    ready = Line(f"Ready in {seconds:.1f} s: {url}{everywhere}", {"ready_s": round(seconds, 3), "url": url})
    return [ready, Line("  " + curl(config, model, tokenizer, capacity))]


def ready_again_line(seconds: float, restart: int, most: int) -> Line:
    text = f"Ready again in {seconds:.1f} s after restart {restart} of {most}"
    return Line(text, {"ready_s": round(seconds, 3), "restart": restart})


def curl(config: EngineConfig, model: str, tokenizer: Any, capacity: Any = None) -> str:
    """A first request, such as the model answers (capacity: the engine's). The key stands in it as the variable of the
    environment, never itself."""
    text: Any = [1, 2, 3] if tokenizer is None else "..."
    route, body = "completions", {"model": model, "prompt": text, "max_tokens": 32}
    if capacity is not None and not capacity.writes:
        route, body = "classify" if capacity.pooling.labels else "embeddings", {"model": model, "input": text}
    elif tokenizer is not None and tokenizer.has_chat_template:
        route, body = "chat/completions", {"model": model, "messages": [{"role": "user", "content": "..."}]}
    url = f"{local_address(config)}/v1/{route}"
    guarded = config.server.api_key is not None or config.server.api_keys_file is not None
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if guarded else ""
    return f"curl {url} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
