"""What a model is, what it needs, which kernels run it here, and how fast: `headrace info`."""

from __future__ import annotations

from typing import Any

from headrace import host
from headrace.config import EngineConfig
from headrace.doctor import machine
from headrace.doctor.expected import expect
from headrace.doctor.model import room, shape_of
from headrace.engine.capacity import model_folder
from headrace.engine.draft_facts import DraftFacts
from headrace.engine.footprint import PROCESS_BYTES
from headrace.engine.outside import ExpertsOutside
from headrace.models.config import ModelConfig, read_config
from headrace.models.files import stored_types, weight_files
from headrace.models.sizes import compute_type, refuse_rounding, weight_bytes
from headrace.models.slots import expected
from headrace.offload.weights.read_rate import read_rate

Facts = dict[str, dict[str, Any]]
"""Section -> name -> what it is."""


def info(config: EngineConfig, free: int | None = None) -> Facts:
    """Facts of the settings' model, whether it fits here or not. free: bytes of memory, if not this machine's.

    Times a few layers of random weights, which takes seconds. Raises ValueError for a folder that is none of a model's,
    UnsupportedModel for what is not implemented, ValueError where quantised weights are to be rounded again, or a draft
    model does not go with the model.
    """
    folder = model_folder(config.model.folder)
    facts, paths = read_config(folder), weight_files(folder)
    refuse_rounding(facts, config.model.quantization)
    free = host.memory_available() if free is None else free
    draft = DraftFacts.of(config)
    if draft is not None:
        draft.check(facts)
    asked = config.model
    weights = weight_bytes(facts, compute_type(facts, asked.dtype), asked.quantization, on_gpu=asked.on_gpu)
    outside = ExpertsOutside.of(config, facts, free)
    rate = None if outside is None else read_rate(outside.folder)
    if outside is not None:
        weights -= outside.outside - outside.kept
    return {
        "file": {
            "path": str(folder),
            "files": len(paths),
            "bytes": sum(path.stat().st_size for path in paths),
            "stored as": stored_types(paths),
        },
        "model": shape_of(facts) | {"parameters": parameters(facts)},
        "memory": {
            "weights bytes": weights,  # that stay in memory
            "free bytes": free,
            "fits": weights + PROCESS_BYTES + (0 if draft is None else draft.weight_bytes) <= free,
            **({} if outside is None else {"experts in a file, bytes": outside.outside, "of these kept": outside.kept}),
            **room(facts, config, free, weights),
        },
        **({} if draft is None else {"draft": _draft(draft)}),
        "kernels": machine.kernels(),
        "expected": _expected(facts, config, outside, rate),
    }


def _draft(draft: DraftFacts) -> dict[str, Any]:
    """Of the model that drafts, whose memory comes beside the model's."""
    return {
        "name": draft.name,
        "architecture": draft.model.architecture,
        "parameters": parameters(draft.model),
        "weights bytes": draft.weight_bytes,
        "KV bytes per token": draft.kv_bytes_per_token,
    }


def parameters(facts: ModelConfig) -> int:
    """Numbers of the model; a head that is the embedding too counts once."""
    slots = expected(facts)
    return sum(slot.count for name, slot in slots.items() if not (facts.tied and name == "head.weight"))


def _expected(
    facts: ModelConfig, config: EngineConfig, outside: ExpertsOutside | None, rate: float | None
) -> dict[str, Any]:
    """rate: bytes a second from the disk of experts in a file, whose reads come on top of what is timed."""
    found, from_disk, seconds = expect(facts, config), {}, 0.0
    if outside is not None and rate is not None:
        seconds = outside.seconds(rate)
        from_disk = {"experts": outside.told(rate), "disk bytes/s": round(rate)}
    return from_disk | {
        "tokens": found.tokens,
        "prefill tokens/s": round(found.prefill_tokens_s, 1),
        "decode tokens/s": round(1 / (1 / found.decode_tokens_s + seconds), 3),
        "layers timed": found.layers,
        "weights timed": found.weights,
        "a layer": found.obstacle or "in C++ as a whole",
    }
