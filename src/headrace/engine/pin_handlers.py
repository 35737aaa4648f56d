"""How calls about pinned prefixes are answered."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from headrace.engine.calls import Answer, ListPrefixes, PinPrefix, ReleasePrefix
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.pins import prompt_to_pin
from headrace.types import InvalidRequest

if TYPE_CHECKING:
    from headrace.engine.core import EngineCore


def pin_prefix(core: EngineCore, call: PinPrefix) -> Generator[None, None, Answer]:
    """Waits, between steps, for the request that computes the prefix."""
    pins = core.pins
    pin = pins.begin(call.id, call.tenant, call.ttl_s, _open(core, call), call.soft)
    settled = False
    try:
        while not pins.attach(pin):
            if not core.shares.is_live(call.after):
                told = (
                    f"{len(pin.table.nodes)} of {pin.chunks} chunks are in the pool: compute the prefix, and ask again"
                )
                raise InvalidRequest(told, None, "not_computed")
            yield
            if pin.over:
                raise InvalidRequest("a request needed the room", None, "gave_way")
        pins.settle(pin)
        settled = True
    finally:
        if not settled and not pin.over:
            pins.drop(pin)
    return pins.told(pin, core.loaded.capacity.kv_bytes_per_token)


def _open(core: EngineCore, call: PinPrefix) -> ChunkTable:
    if not core.loaded.config.cache.prefix_caching:
        told = "with enable_prefix_caching off no chunk is kept for later requests: start the engine with it"
        raise InvalidRequest(told, None, "unsupported_parameter")
    prompt = prompt_to_pin(call.tokens)
    return core.cache.open(
        prompt,
        salt=call.salt,
        public_tokens=call.public_prefix_tokens,
        namespace=core.loaded.decoder.config.rope_namespace(len(prompt)),
        mark=core.loaded.capacity.adapter_mark(call.adapter, call.adapter_start),
    )


def release_prefix(core: EngineCore, call: ReleasePrefix) -> Answer:
    pin = core.pins.release(call.id, call.tenant)
    return core.pins.told(pin, core.loaded.capacity.kv_bytes_per_token)


def list_prefixes(core: EngineCore, call: ListPrefixes) -> Answer:
    pins = core.pins
    return [pins.told(pin, core.loaded.capacity.kv_bytes_per_token) for pin in pins.of(call.tenant)]
