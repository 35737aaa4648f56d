"""What this machine offers an engine, and why something is not used: findings by title and name."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace import cores, host
from headrace.doctor import settings
from headrace.host import GIB
from headrace.version import __version__

FLAGS = (
    "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
)  # fmt: skip
PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "openai", "ray", "redis")
PROBE_BYTES = 256 * 2**20
PROBES = 3
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def findings() -> dict[str, dict[str, Any]]:
    return {
        "processor": processor(),
        "memory": memory(),
        "accelerators": accelerators(),
        "kernels": kernels(),
        "ranks": ranks(),
        "tiers": tiers(),
        "settings": settings.findings(os.environ),
        "software": {
            "headrace": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def processor() -> dict[str, Any]:
    import torch

    facts, load = host.processor(), os.getloadavg()[0] / (os.cpu_count() or 1)
    have = facts.get("flags", facts.get("Features", "")).split()
    return {
        "name": host.processor_name(),
        "architecture": platform.machine(),
        "cores usable": cores.usable(),
        "CPU quota of the container": "none" if (quota := cores.quota()) is None else quota,
        "torch threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "load of the machine's cores": round(load, 2),
        "instructions": " ".join(flag for flag in FLAGS if flag in have) or "none of " + " ".join(FLAGS),
    }


def memory() -> dict[str, Any]:
    limit = host.memory_limit()
    return {
        "total GiB": host.memory_total() / GIB,
        "free GiB": host.memory_available() / GIB,
        "limit of the container GiB": "none" if limit is None else limit / GIB,
        "transparent huge pages": _huge_pages(),
        "read bandwidth GB/s": read_bandwidth(),
    }


def read_bandwidth() -> float:
    """Best of a few reads of an array larger than the caches, by all of torch's threads, in 1e9 bytes a second."""
    import torch

    data = torch.ones(PROBE_BYTES // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(PROBES):
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

        why_not = cpu.unavailable_reason()
        native = f"available ({cpu.isa()})" if why_not is None else f"not available: {why_not}"
        here = ", ".join(cpu.available_isas()) if why_not is None else "none"
        no_triton = backend_of("triton").missing()
        reasons = dispatch.reasons()
    except Exception as error:
        return {"kernels": f"cannot be used: {error}"}
    triton = "available (attention_backend 'triton')" if no_triton is None else f"not available: {no_triton}"
    return {"C++ kernels": native, "C++ instructions here": here, "Triton kernels": triton, **reasons}


def ranks() -> dict[str, Any]:
    """The group that the environment's settings ask for, and what ranks could use here. Nothing is started."""
    try:
        from headrace.config import config_from_env
        from headrace.engine.footprint import ranks_here
        from headrace.engine.ranks import describe
        from headrace.parallel.interfaces import addresses
        from headrace.parallel.launch import SECRET

        config = config_from_env()
        asked = describe(config)
    except Exception as error:
        return {"ranks": f"cannot be started: {error}"}
    table = config.ranks.table or "none: measured when the ranks start"
    return {
        "by the environment's settings": asked,
        "ranks on this host": ranks_here(config),
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
    return findings_of(config, host.memory_available()) | _own_disk(config)


def _own_disk(config: Any) -> dict[str, str]:
    """Where `headrace serve` keeps KV by default."""
    from headrace.config.environment import from_home
    from headrace.offload.tiers import own_disk

    if config.tiers is not None or config.streaming is not None or "HEADRACE_KV_OFFLOAD_PATH" in os.environ:
        return {}
    try:
        return {"serve": f"keeps KV in {from_home(own_disk.kv_folder())} unless kv_offload_path is none"}
    except own_disk.Unusable as error:
        return {"serve": f"keeps no KV on disk: {error}"}


def _backends() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "none: torch is built without torch.distributed"
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return ", ".join(name for name, there in found.items() if there) or "none"


def _huge_pages() -> str:
    """The choice in brackets: always, madvise or never."""
    try:
        text = HUGE_PAGES.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
