"""From settings to a loaded engine: model, tokenizer, KV cache and kernels, sized to the machine."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.config import EngineConfig, Quantization
from headrace.engine.capacity import Capacity, model_folder
from headrace.engine.driver import Driver
from headrace.engine.runner import Runner
from headrace.engine.tokenizer import Tokenizer
from headrace.kernels import table
from headrace.kv.cache import KVCache
from headrace.kv.storage import LAYOUT, KVStorage
from headrace.models.decoder import Decoder, load_decoder
from headrace.types import CHUNK, chunks_for

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loaded:
    """All that a running engine consists of."""

    config: EngineConfig
    capacity: Capacity
    decoder: Decoder
    tokenizer: Tokenizer | None
    cache: KVCache
    runner: Runner | Driver


def load(config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> Loaded:
    """Loads the model and sizes its cache. Raises ValueError or UnsupportedModel, naming what is wrong.

    progress(done, total) is called as weights arrive.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = model_folder(config.model)
    decoder = load_decoder(folder, config.dtype, progress, config.quantization)
    backend = table.choose(config.attention_backend, decoder.dtype, torch.device("cpu"))
    spec = decoder.config.attention
    kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else decoder.dtype
    bytes_per_token = KVStorage.bytes_per_token(spec, kv_dtype)
    tokens, max_len = _sizes(config, decoder.config.max_model_len, bytes_per_token)
    storage = KVStorage(spec, tokens // CHUNK, kv_dtype)
    if config.kv_cache_prefault:
        storage.prefault()
    tokenizer = Tokenizer.load(folder)
    capacity = Capacity(
        model=config.served_model_name or config.model,
        folder=str(folder),
        dtype=str(decoder.dtype).removeprefix("torch."),
        quantization=config.quantization,
        backend=backend,
        kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
        kv_cache_tokens=tokens,
        kv_bytes_per_token=bytes_per_token,
        max_model_len=max_len,
        max_sequences=min(config.max_sequences, config.max_batch_tokens),
        vocab_size=decoder.config.vocab_size,
        eos_token_ids=_eos(decoder, tokenizer),
        kernels=_kernels(config.quantization),
    )
    cache = KVCache(tokens // CHUNK, _identity(folder, capacity))
    return Loaded(config, capacity, decoder, tokenizer, cache, Runner(decoder, storage, backend))


def _kernels(quantization: Quantization) -> dict[str, str]:
    """Operation -> implementation and reason; of the linear layers those in use."""
    linear = "linear" if quantization == "none" else f"linear_{quantization}"
    return {name: why for name, why in table.reasons().items() if name == linear or not name.startswith("linear")}


def _sizes(config: EngineConfig, model_len: int, bytes_per_token: int) -> tuple[int, int]:
    """(tokens of KV cache, whole chunks; longest sequence). The cache holds the longest sequence at least."""
    if config.max_model_len is not None and config.max_model_len > model_len:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds the model's {model_len}")
    wanted = config.max_model_len or model_len
    if config.kv_cache_tokens is not None:
        tokens = config.kv_cache_tokens // CHUNK * CHUNK
        if config.max_model_len is not None and config.max_model_len > tokens:
            raise ValueError(
                f"kv_cache_tokens {config.kv_cache_tokens} holds no sequence of max_model_len {config.max_model_len}"
            )
        return tokens, min(wanted, tokens)
    affordable = _free_memory() // 4 // bytes_per_token // CHUNK * CHUNK
    tokens = min(affordable, config.max_sequences * chunks_for(wanted) * CHUNK)
    if tokens < CHUNK:
        raise ValueError(f"no memory for a KV cache: {bytes_per_token} bytes a token; set kv_cache_tokens")
    return tokens, min(wanted, tokens)


def _free_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _eos(decoder: Decoder, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    own = decoder.config.eos_token_ids
    extra = tokenizer.eos_token_id if tokenizer else None
    return own if extra is None or extra in own else (*own, extra)


def _identity(folder: Path, capacity: Capacity) -> bytes:
    """What chunks of this engine are made by: model, layout, types computed in and stored, rounding."""
    facts = [(folder / "config.json").read_bytes(), LAYOUT.encode(), capacity.backend.encode()]
    facts += [capacity.dtype.encode(), capacity.kv_cache_dtype.encode(), capacity.quantization.encode()]
    facts.append(str(folder).encode())
    for path in sorted(folder.glob("*.safetensors")):
        facts.append(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return hashlib.sha256(b"\0".join(facts)).digest()
