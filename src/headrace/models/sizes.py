"""How much memory a model takes, from its facts alone. Imports no torch."""

from __future__ import annotations

from headrace.config import AttentionSpec, KVDType, Quantization
from headrace.host import GIB
from headrace.models.shards import Share
from headrace.models.slots import Slot, expected, expert_of, in_feed_forward, is_exact
from headrace.models.spec import ModelConfig, StoredWeights

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of a number by type; float16 is computed in bfloat16."""
SCALE_BYTES = 4
EMBED, HEAD, HEAD_BIAS = "embed.weight", "head.weight", "head.bias"
LOOKED_UP = (EMBED, "positions.weight", "layer_embed.weight")
"""Tables of rows: looked up, not multiplied by."""


def compute_type(config: ModelConfig, dtype: str) -> str:
    """The name of the type that is computed in where `dtype` is asked for."""
    found = config.dtype if dtype == "auto" else dtype
    return "bfloat16" if found == "float16" else found


def kv_bytes_per_token(spec: AttentionSpec, compute: str, kv_dtype: KVDType) -> int:
    """Bytes of one token's K and V over all layers, scales included."""
    if kv_dtype == "int8":
        return spec.kv_bytes_per_token(1) + spec.vectors_per_token() * SCALE_BYTES
    return spec.kv_bytes_per_token(BYTES[compute])


def refuse_rounding(config: ModelConfig, quantization: Quantization) -> None:
    """Raises ValueError where weights that are quantised already are to be rounded again."""
    if config.stored is not None and quantization != "none":
        raise ValueError(
            f"quantization {quantization}: the model's weights are quantised already "
            f"({', '.join(config.stored.formats)}), and are used as they are; leave quantization out"
        )


def weight_bytes(
    config: ModelConfig,
    compute: str,
    quantization: Quantization = "none",
    rank: int = 0,
    ranks: int = 1,
    on_gpu: bool = False,
) -> int:
    """Bytes of the weights of one tensor rank, once loaded. Of weights that are stored quantised an equal share, but of
    the table of tokens, which all ranks have, and the head, which the first has. A head that is the table too is held
    once, unless it is rounded, or codes on a GPU, which looks up numbers."""
    if config.stored is not None:
        return _stored_bytes(config, config.stored, compute, rank, ranks, on_gpu)
    slots = expected(config)
    if config.tied and quantization in ("none", "fp8_rowwise"):
        slots.pop(HEAD, None)
    return _bytes_of(config, slots, compute, quantization, rank, ranks)


def loading_bytes(config: ModelConfig, compute: str, ranks: int = 1, on_gpu: bool = False) -> int:
    """The same of the most that there is while they are loaded: nothing is rounded yet, and a head that is the table
    too is packed."""
    if config.stored is not None:
        return weight_bytes(config, compute, ranks=ranks, on_gpu=on_gpu)
    return _bytes_of(config, expected(config), compute, "none", 0, ranks)


def _stored_bytes(config: ModelConfig, stored: StoredWeights, compute: str, rank: int, ranks: int, on_gpu: bool) -> int:
    """A head of its own is taken to be as large as the table."""
    numbers = config.vocab_size * config.embed_size * BYTES[compute]
    table = stored.table or min(numbers, stored.bytes // 2)
    head = table if config.head and not config.tied else 0
    kept = (stored.bytes - table - head) // ranks + (head if rank == 0 else 0)
    if stored.table and on_gpu:  # the table is multiplied out; as a head it stays codes
        return kept + numbers + (table if config.head and config.tied and rank == 0 else 0)
    return kept + table


def expert_bytes(config: ModelConfig, compute: str, quantization: Quantization = "none", ranks: int = 1) -> int:
    """Of these, bytes of the experts; 0 where there are none."""
    slots = expected(config)
    experts = {name: slot for name, slot in slots.items() if expert_of(name) is not None}
    if config.stored is None:
        return _bytes_of(config, experts, compute, quantization, 0, ranks)
    numbers, every = (sum(slot.count for slot in each.values()) for each in (experts, slots))
    return config.stored.bytes * numbers // every // ranks


def refuse_slots(room: int, count: int, size: int) -> None:
    """Raises ValueError where `room` bytes of a GPU do not hold a layer's `count` experts of `size` bytes each."""
    if room < count * size:
        raise ValueError(
            f"expert_memory_size: a layer has {count} experts, all of which a prompt may meet, and they take "
            f"{count * size / GIB:.3g} GiB of the GPU; give at least that"
        )


def _bytes_of(
    config: ModelConfig, slots: dict[str, Slot], compute: str, quantization: Quantization, rank: int, ranks: int
) -> int:
    share = None if ranks == 1 else Share(config, rank, ranks)
    return sum(
        _bytes(name, slot, _rows(name, slot, share), BYTES[compute], quantization)
        for name, slot in slots.items()
        if share is None or share.holds(name)
    )


def _rows(name: str, slot: Slot, share: Share | None) -> int:
    rows = share.rows(name) if share is not None else None
    return sum(slot.parts) if rows is None else sum(map(len, rows))


def _bytes(name: str, slot: Slot, rows: int, each: int, quantization: Quantization) -> int:
    columns = slot.columns or 1
    if slot.wide:
        return rows * columns * BYTES["float32"]
    exact = name in LOOKED_UP or is_exact(name) or (quantization == "fp8_rowwise" and not in_feed_forward(name))
    if quantization == "none" or slot.columns is None or exact:
        return rows * columns * each
    if quantization == "w8a8" and name != "head.weight":
        return rows * (columns + 2 * SCALE_BYTES)  # and the sum of an output's codes
    if quantization in ("int8", "w8a8", "fp8_rowwise"):
        return rows * (columns + SCALE_BYTES)
    return rows * columns // 2 + rows * columns // 64 * 2
