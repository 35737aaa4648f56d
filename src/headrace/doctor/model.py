"""What a model takes of this machine's memory: weights, KV of a token, the longest context, requests at once."""

from __future__ import annotations

from typing import Any

from headrace import host
from headrace.config import AttentionSpec, EngineConfig, config_from_env
from headrace.engine.capacity import model_folder
from headrace.engine.draft_facts import DraftFacts
from headrace.engine.footprint import AUTO_SHARE, PROCESS_BYTES, Footprint, ranks_here
from headrace.host import GIB
from headrace.models.config import ModelConfig, read_config
from headrace.models.files import weight_files
from headrace.types import CHUNK, chunks_for

LENGTHS = (2048, 8192, 32_768, 131_072)
"""Tokens of the requests whose number at once is told, where the model takes so many."""


def check_model(model: str, free: int | None = None) -> dict[str, Any]:
    """Facts of a model folder against the memory that is free. Raises ValueError for what cannot be served."""
    from headrace.engine.tokenizer import Tokenizer

    folder = model_folder(model)
    facts = read_config(folder)
    free = host.memory_available() if free is None else free
    weights = sum(path.stat().st_size for path in weight_files(folder))
    if weights + PROCESS_BYTES > free:
        raise ValueError(
            f"model {model!r} cannot be served here: its weights take {weights / GIB:,.1f} GiB, and "
            f"{free / GIB:,.1f} GiB are free; free memory, or take a smaller model"
        )
    tokenizer = Tokenizer.load(folder)
    template = "chat template" if tokenizer and tokenizer.has_chat_template else "no chat template"
    return shape_of(facts) | {
        "folder": folder,
        "tokenizer": "none" if tokenizer is None else template,
        "weights GiB": f"{weights / GIB:.3f}",
        "weights bytes": weights,
        **room(facts, config_from_env(model=model), free, weights),
    }


def shape_of(facts: ModelConfig) -> dict[str, Any]:
    spec, experts = facts.attention, facts.experts
    told = {} if experts is None else {"experts, met by a token": f"{experts.count}, {experts.chosen}"}
    return {
        "architecture": facts.architecture,
        "type of the weights": facts.dtype,
        "layers, query heads, KV heads, head size": f"{facts.layers}, {spec.heads}, {_each(0, spec)}, {_each(1, spec)}",
        **told,
        "vocabulary": f"{facts.vocab_size:,}",
        "context tokens": f"{facts.max_model_len:,}",
    }


def _each(part: int, spec: AttentionSpec) -> str:
    """KV heads (0) or head sizes (1) of the layers, each number once."""
    return " or ".join(dict.fromkeys(str(shape[part]) for shape in spec.every_shape))


def room(facts: ModelConfig, config: EngineConfig, free: int, weights: int) -> dict[str, Any]:
    """Tokens that fit: into the KV cache as the settings make it, and into all memory that is free; beside recurrent
    states, if the model has some, and beside the model that drafts, if one does. weights: bytes of the model's own."""
    draft = DraftFacts.of(config)
    if draft is not None:
        weights += draft.weight_bytes
    drafts = 0 if draft is None else draft.kv_bytes_per_token
    taken = Footprint(config, facts, free, weights + PROCESS_BYTES, weights + PROCESS_BYTES)
    states, beside = taken.states(), taken.state_bytes()
    each, own = kv_bytes(facts), "fp32" if computes_in(facts, config) == "float32" else "bf16"
    sizes = {own: each[own] + drafts, "int8": each["int8"] + drafts}
    most = {kind: _chunks(max(0, free - weights - PROCESS_BYTES - beside) // size) for kind, size in sizes.items()}
    given = config.cache.tokens
    pool = {
        kind: _chunks(max(0, free // AUTO_SHARE - beside) // size if given is None else given)
        for kind, size in sizes.items()
    }
    wanted = config.model.max_len or facts.max_model_len
    longest = min(wanted, pool[own])
    ranks = ranks_here(config)
    recurrent = (
        {} if states is None else {"recurrent states": states, "bytes of a recurrent state": beside // states // ranks}
    )
    return recurrent | {
        "KV type as computed": own,
        f"KV bytes per token ({own})": f"{each[own]:,}",
        "KV bytes per token (int8)": f"{each['int8']:,}",
        "KV bytes per token (as computed)": f"{each[own]:,}",
        "KV tokens that fit in the free memory": f"{max(0, free - weights) // sizes[own]:,}",
        "KV cache tokens": pool[own],
        "KV cache tokens at most": most[own],
        "KV cache is sized by": "a quarter of the free memory" if given is None else "kv_cache_tokens",
        "longest context here": longest,
        "longest context is limited by": _limit(facts, config, longest),
        "sequences at once": min(config.scheduler.max_sequences, states or config.scheduler.max_sequences),
        "requests at once": [_at_once(length, pool, most, config) for length in _lengths(wanted, most["int8"])],
    }


def kv_bytes(facts: ModelConfig) -> dict[str, int]:
    """Bytes of one token's K and V over all layers, by type; int8 with its scales."""
    spec = facts.attention
    scales = spec.vectors_per_token() * 4
    return {"fp32": spec.kv_bytes_per_token(4), "bf16": spec.kv_bytes_per_token(2),
            "int8": spec.kv_bytes_per_token(1) + scales}  # fmt: skip


def computes_in(facts: ModelConfig, config: EngineConfig) -> str:
    """The type that is computed in, and that K and V have by default; float16 is computed in bfloat16."""
    found = facts.dtype if config.model.dtype == "auto" else config.model.dtype
    return "bfloat16" if found == "float16" else found


def _chunks(tokens: int) -> int:
    return tokens // CHUNK * CHUNK


def _limit(facts: ModelConfig, config: EngineConfig, longest: int) -> str:
    if longest == facts.max_model_len:
        return "the model"
    if longest == config.model.max_len:
        return "max_model_len"
    if config.cache.tokens is not None:
        return "kv_cache_tokens"
    return "memory"


def _lengths(longest: int, most: int) -> list[int]:
    return sorted({length for length in (*LENGTHS, longest) if length <= min(longest, max(most, LENGTHS[0]))})


def _at_once(length: int, pool: dict[str, int], most: dict[str, int], config: EngineConfig) -> dict[str, int]:
    each = chunks_for(length) * CHUNK
    found = {"tokens": length}
    for place, tokens in (("by default, {}", pool), ("{}, all free memory", most)):
        for kind in tokens:
            found[place.format(kind)] = min(tokens[kind] // each, config.scheduler.max_sequences)
    return found
