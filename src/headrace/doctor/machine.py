"""What this machine offers an engine, and why something is not used: findings by title and name."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from typing import Any

from headrace import cores, host
from headrace.host import GIB

FLAGS = (
    "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
)  # fmt: skip
PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "openai", "ray", "redis")
PROBE_BYTES = 512 * 2**20


def findings() -> dict[str, dict[str, Any]]:
    return {
        "processor": processor(),
        "memory": memory(),
        "accelerators": accelerators(),
        "kernels": kernels(),
        "ranks": ranks(),
        "tiers": tiers(),
        "software": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def processor() -> dict[str, Any]:
    import torch

    facts = host.processor()
    have = facts.get("flags", facts.get("Features", "")).split()
    return {
        "name": host.processor_name(),
        "architecture": platform.machine(),
        "cores usable": cores.usable(),
        "CPU quota of the container": "none" if (quota := cores.quota()) is None else quota,
        "torch threads": torch.get_num_threads(),
        "instructions": " ".join(flag for flag in FLAGS if flag in have) or "none of " + " ".join(FLAGS),
    }


def memory() -> dict[str, Any]:
    limit = host.memory_limit()
    return {
        "total GiB": host.memory_total() / GIB,
        "free GiB": host.memory_available() / GIB,
        "limit of the container GiB": "none" if limit is None else limit / GIB,
        "read bandwidth GB/s": read_bandwidth(),
    }


def read_bandwidth() -> float:
    """Best of five reads of an array larger than the caches, by all of torch's threads, in 1e9 bytes a second."""
    import torch

    data = torch.ones(PROBE_BYTES // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return PROBE_BYTES / best / 1e9


def accelerators() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but finds no device" if built else "torch is built without CUDA"
        return {"CUDA": f"none: {why}"}
    found = {}
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = f"{facts.name}, {facts.total_memory / GIB:.1f} GiB, sm_{facts.major}{facts.minor}"
    return found


def kernels() -> dict[str, Any]:
    """Operation -> implementation and reason. A kernel package that cannot be imported is a finding, not an error."""
    try:
        from headrace.kernels import cpu, dispatch
        from headrace.kernels.backend import backend_of
    except Exception as error:
        return {"kernels": f"cannot be imported: {error}"}
    why_not = cpu.unavailable_reason()
    native = f"available ({cpu.isa()})" if why_not is None else f"not available: {why_not}"
    no_triton = backend_of("triton").missing()
    triton = "available (attention_backend 'triton')" if no_triton is None else f"not available: {no_triton}"
    return {"C++ kernels": native, "Triton kernels": triton, **dispatch.reasons()}


def ranks() -> dict[str, Any]:
    """The group that the environment's settings ask for, and what ranks could use here. Nothing is started."""
    try:
        from headrace.config import config_from_env
        from headrace.engine.ranks import describe
        from headrace.parallel.group import addresses
        from headrace.parallel.launch import SECRET

        config = config_from_env()
        asked = describe(config)
    except Exception as error:
        return {"ranks": f"cannot be started: {error}"}
    table = config.ranks.table or "none: measured when the ranks start"
    return {
        "by the environment's settings": asked,
        "prefill strategy": f"{config.ranks.strategy}, rule {config.ranks.rule}",
        "profile": table,
        "backends": _backends(),
        "interfaces": ", ".join(f"{name} ({address})" for address, name in sorted(addresses().items())),
        SECRET: "set" if os.environ.get(SECRET) else "not set (several hosts under torchrun need it)",
    }


def tiers() -> dict[str, Any]:
    """The tiers below the KV pool that the environment's settings ask for, and how they do."""
    from headrace.config import config_from_env
    from headrace.doctor.tiers import findings_of

    try:
        config = config_from_env()
    except ValueError as error:
        return {"tiers": f"cannot be used: {error}"}
    return findings_of(config, host.memory_available())


def _backends() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "none: torch is built without torch.distributed"
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return ", ".join(name for name, there in found.items() if there) or "none"


def check_model(model: str) -> dict[str, Any]:
    """Facts of a model folder against this machine's memory. Raises ValueError for what cannot be served."""
    from headrace.engine.capacity import model_folder
    from headrace.engine.tokenizer import Tokenizer
    from headrace.models.config import read_config

    folder = model_folder(model)
    config = read_config(folder)
    tokenizer = Tokenizer.load(folder)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    spec = config.attention
    per_token = spec.kv_bytes_per_token(2)
    free = host.memory_available()
    template = "chat template" if tokenizer and tokenizer.has_chat_template else "no chat template"
    return {
        "folder": folder,
        "layers, query heads, KV heads, head size": f"{spec.layers}, {spec.heads}, {spec.kv_heads}, {spec.head_dim}",
        "vocabulary": f"{config.vocab_size:,}",
        "context tokens": f"{config.max_model_len:,}",
        "tokenizer": "none" if tokenizer is None else template,
        "weights GiB": f"{weights / GIB:.3f}",
        "KV bytes per token (bf16)": f"{per_token:,}",
        "KV tokens that fit in the free memory": f"{max(0, free - weights) // per_token:,}",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
