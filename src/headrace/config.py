"""Settings: one class for the engine and its server, and the facts of a model that every room may need.

Each field of EngineConfig is a flag (`--kv-cache-tokens`) and has an environment twin (`HEADRACE_KV_CACHE_TOKENS`);
the command line is generated from this class. Imports no torch.
"""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

from headrace.types import CHUNK

DType = Literal["auto", "bfloat16", "float32"]
KVDType = Literal["auto", "int8"]
Backend = Literal["auto", "reference", "cpu", "triton"]
Quantization = Literal["none", "int8", "int4"]
PrefillStrategy = Literal["auto", "single", "gather", "chain", "ring-kv", "ring-q"]
StrategyRule = Literal["cost", "alg1", "alg5", "heuristic"]
OffloadFormat = Literal["raw", "int8", "int4"]  # tiers keep a format's place in this list: new ones come last
OffloadSchedule = Literal["off", "row", "column", "auto"]
Switch = Literal["auto", "on", "off"]

DistributedBackend = Literal["mp", "ray"]

ENV_PREFIX = "HEADRACE_"
DISK_GIB = 32.0

REMOTE_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
"""Schemes of kv_remote_url; the doubled s is TLS, unix a socket's path."""


def _flag(default: Any, help: str, *aliases: str) -> Any:
    """A field with its help text and further flag names (vLLM's, where the meaning is the same)."""
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass(slots=True)
class EngineConfig:
    """All settings. Raises ValueError, naming the field and the remedy, for values that cannot work."""

    model: str = _flag("tiny", "Model folder in Hugging Face form, or 'tiny' for the shipped model.")
    dtype: DType = _flag(
        "auto", "Compute type: bfloat16, float32, or auto (the checkpoint's; float16 becomes bfloat16)."
    )
    quantization: Quantization = _flag(
        "none", "Weights rounded as they load: none, int8 (a scale per output), int4 (a scale per 64 inputs)."
    )
    max_model_len: int | None = _flag(None, "Longest sequence, prompt and answer together, in tokens.")
    kv_cache_tokens: int | None = _flag(
        None, "KV cache of each rank, in tokens. Default: a quarter of the free memory."
    )
    kv_cache_dtype: KVDType = _flag(
        "auto", "Type of the cached keys and values: auto (the compute type) or int8 (half of bfloat16, lossy)."
    )
    kv_cache_prefault: bool = _flag(
        False, "Touch all of the KV cache's memory at start, so that no request waits for the system to map it."
    )
    enable_prefix_caching: bool = _flag(True, "Share and keep the KV of common prefixes.")
    max_batch_tokens: int = _flag(
        0, "Most tokens computed in one step. Default (0): 2048, with several ranks 16384.", "--max-num-batched-tokens"
    )
    max_sequences: int = _flag(256, "Most sequences running at once.", "--max-num-seqs")
    attention_backend: Backend = _flag(
        "auto", "Attention kernels: auto, reference (slow truth), cpu (C++), or triton: everything on a CUDA device."
    )
    seed: int = _flag(0, "Seed of requests that bring none.")
    threads: int | None = _flag(
        None, "CPU threads of the engine. Default: all cores that it may use (affinity, CPU quota)."
    )
    context_parallel_size: int = _flag(1, "Ranks that share the tokens of a sequence and its KV cache.", "-cp")
    tensor_parallel_size: int = _flag(1, "Ranks that share the weights, within each context rank.", "-tp")
    distributed_backend: DistributedBackend = _flag(
        "mp", "Who starts the ranks: mp (this process, or torchrun where it did) or ray (a Ray cluster)."
    )
    prefill_strategy: PrefillStrategy = _flag(
        "auto",
        "How several ranks compute a prompt: auto (as the planner says), single, gather, chain, ring-kv, ring-q.",
    )
    strategy_rule: StrategyRule = _flag(
        "cost", "How the planner chooses: cost (predicted time), or between the rings alg1, alg5 or heuristic."
    )
    parallel_table: str | None = _flag(None, "Table that `headrace tune` wrote for this machine, model and group.")
    kv_offloading_size: float = _flag(
        0.0, "GiB of host memory for KV that leaves the pool; with --offload-schedule, for all of the KV cache."
    )
    kv_offload_path: str | None = _flag(
        None,
        "Directory for KV on disk, which survives a restart; with --offload-schedule, of a file with all of the KV.",
    )
    kv_offload_disk_size: float = _flag(DISK_GIB, "GiB that KV may take on disk.")
    kv_remote_url: str | None = _flag(None, "Valkey or Redis server for KV, as redis://HOST:PORT/DB.")
    kv_remote_size: float = _flag(
        0.0, "GiB that KV may take remotely, with --kv-tenant-quota; 0: the server decides (its maxmemory)."
    )
    kv_host_format: OffloadFormat = _flag("raw", "How KV is stored in host memory: raw (no loss), int8 or int4.")
    kv_disk_format: OffloadFormat = _flag("raw", "How KV is stored on disk: raw (no loss), int8 or int4.")
    kv_remote_format: OffloadFormat = _flag("raw", "How KV is stored remotely: raw (no loss), int8 or int4.")
    kv_offload_activations: Switch = _flag(
        "auto", "Store the inputs of the K and V projections too: auto (where they are smaller than K and V), on, off."
    )
    kv_offload_timeout_s: float = _flag(1.0, "Longest time that a call to a tier may take; then it is left alone.")
    kv_offload_queue_mb: int = _flag(256, "MiB that may wait to be written to each tier.")
    kv_tenant_quota: float = _flag(0.25, "Share of each tier that no other tenant can take from one (cache_salt).")
    kv_link_gbps: float | None = _flag(None, "Emulate a link of so many GB/s to where KV is kept. For experiments.")
    kv_link_latency_ms: float = _flag(0.0, "Latency of the emulated link, per transfer.")
    offload_schedule: OffloadSchedule = _flag(
        "off", "Decode on KV that stays outside the pool: row (latency), column (throughput), auto; off: KV comes back."
    )
    offload_batches: int = _flag(4, "Batches into which the column schedule divides the sequences of a step.")
    offload_staging_mb: int = _flag(512, "MiB of fast memory through which KV passes while it is streamed.")
    offload_x_resident: bool = _flag(
        False, "Keep the inputs of the K and V projections in fast memory while KV is streamed (half of KV in MHA)."
    )
    weight_offload: bool = _flag(False, "Keep the weights outside too and load each layer's when it is computed.")
    rank_interface: str = _flag("127.0.0.1", "IPv4 address that ranks bind to talk to each other.")
    rank_timeout_s: float = _flag(10.0, "Seconds of silence after which a rank counts as lost.")
    host: str = _flag("127.0.0.1", "Address the server binds.")
    port: int = _flag(8000, "Port the server binds.")
    api_key: str | None = _flag(
        None, "Key that clients must send as 'Authorization: Bearer KEY' (all routes but /health)."
    )
    served_model_name: str | None = _flag(None, "Name of the model in the API. Default: the model as given.")
    max_connections: int | None = _flag(
        None, "Connections open at once; then idle ones make room. Default: as file descriptors allow, at most 10,000."
    )
    max_queued_requests: int = _flag(512, "Requests that may wait; more are refused with 429.")
    max_queued_tokens: int = _flag(1_000_000, "Prompt tokens that may wait; more are refused with 429.")
    log_interval_s: float = _flag(5.0, "Seconds between status lines while busy.")
    restart: bool = _flag(True, "Start the engine again after a failure; without it the server ends with code 1.")
    engine_timeout_s: float = _flag(10.0, "An engine process silent for so many seconds counts as hung and is killed.")

    def __post_init__(self) -> None:
        if self.max_batch_tokens == 0:
            several = isinstance(self.context_parallel_size, int) and self.context_parallel_size > 1
            self.max_batch_tokens = 16384 if several else 2048
        for name in (
            "max_batch_tokens", "max_sequences", "max_queued_requests", "max_queued_tokens", "context_parallel_size",
            "tensor_parallel_size", "offload_batches", "offload_staging_mb",
        ):  # fmt: skip
            self._at_least(name, 1)
        for name, low in (("max_model_len", 1), ("threads", 1), ("max_connections", 1)):
            if getattr(self, name) is not None:
                self._at_least(name, low)
        if self.kv_cache_tokens is not None:
            self._at_least("kv_cache_tokens", CHUNK)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key must not be empty; leave it out to serve without one")
        for name in ("log_interval_s", "engine_timeout_s", "rank_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        self._check_interface()
        self._check_choices()
        self._check_offload_values()
        self._check_offload_together()
        self._check_gpu()

    def _check_choices(self) -> None:
        choices = {
            "dtype": DType, "quantization": Quantization, "attention_backend": Backend, "kv_cache_dtype": KVDType,
            "distributed_backend": DistributedBackend, "prefill_strategy": PrefillStrategy,
            "strategy_rule": StrategyRule, "kv_host_format": OffloadFormat, "kv_disk_format": OffloadFormat,
            "kv_remote_format": OffloadFormat, "kv_offload_activations": Switch, "offload_schedule": OffloadSchedule,
        }  # fmt: skip
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")

    @property
    def offloads(self) -> bool:
        """Whether KV is kept in tiers below the pool."""
        return self._keeps_outside and self.offload_schedule == "off"

    @property
    def outlives(self) -> bool:
        """Whether KV outlives the engine, on disk or remotely."""
        return self.offloads and (self.kv_offload_path is not None or self.kv_remote_url is not None)

    @property
    def streams(self) -> bool:
        """Whether each step fetches KV, or weights, from outside the pool."""
        return self.offload_schedule != "off"

    @property
    def _keeps_outside(self) -> bool:
        return self.kv_offloading_size > 0 or self.kv_offload_path is not None or self.kv_remote_url is not None

    @property
    def redis_url(self) -> str | None:
        """kv_remote_url as the clients of the protocol know it: redis(s) for valkey(s)."""
        url = self.kv_remote_url
        return "redis" + url.removeprefix("valkey") if url is not None and url.startswith("valkey") else url

    def _check_offload_values(self) -> None:
        """Raises ValueError for settings of the tiers that cannot work whatever the others are."""
        for name in ("kv_offloading_size", "kv_offload_disk_size", "kv_remote_size", "kv_link_latency_ms"):
            self._finite(name, "0 or more", getattr(self, name), lambda value: value >= 0)
        for name in ("kv_offload_timeout_s", *(["kv_link_gbps"] if self.kv_link_gbps is not None else [])):
            self._finite(name, "above 0", getattr(self, name), lambda value: value > 0)
        self._finite("kv_tenant_quota", "between 0 and 1", self.kv_tenant_quota, lambda value: 0 <= value <= 1)
        self._at_least("kv_offload_queue_mb", 1)
        if self.kv_offload_path is not None and not self.kv_offload_path.strip():
            raise ValueError("kv_offload_path must name a directory; leave it out to keep nothing on disk")
        if self.kv_remote_url is not None:
            _check_remote_url(self.kv_remote_url)

    def _check_offload_together(self) -> None:
        """Raises ValueError for settings of the tiers that do not fit each other or the rest."""
        disk, remote = self.kv_offload_path is not None, self.kv_remote_url is not None
        host, outside = self.kv_offloading_size > 0, self._keeps_outside
        somewhere = "set kv_offloading_size, kv_offload_path or kv_remote_url"
        needs = [
            (self.kv_host_format != "raw", host, "kv_host_format", "a tier in host memory: set kv_offloading_size"),
            (self.kv_disk_format != "raw", disk, "kv_disk_format", "a tier on disk: set kv_offload_path"),
            (self.kv_remote_format != "raw", remote, "kv_remote_format", "a remote tier: set kv_remote_url"),
            (disk, self.kv_offload_disk_size > 0, "kv_offload_path", "room: raise kv_offload_disk_size above 0"),
            (self.kv_offload_disk_size != DISK_GIB, disk, "kv_offload_disk_size", "a directory: set kv_offload_path"),
            (self.kv_remote_size > 0, remote, "kv_remote_size", "a server: set kv_remote_url"),
            (self.kv_offload_activations != "auto", outside, "kv_offload_activations", f"a tier: {somewhere}"),
            (self.kv_link_gbps is not None, outside or self.weight_offload, "kv_link_gbps", f"a tier: {somewhere}"),
            (self.kv_link_latency_ms > 0, outside or self.weight_offload, "kv_link_latency_ms", f"a tier: {somewhere}"),
            (self.streams, host or disk, "offload_schedule", "a place for KV: set kv_offloading_size or "
             "kv_offload_path"),
            (self.weight_offload, self.streams, "weight_offload", "a schedule: set offload_schedule"),
            (self.offload_x_resident, self.streams, "offload_x_resident", "a schedule: set offload_schedule"),
            (self.offload_batches != 4, self.streams, "offload_batches", "a schedule: set offload_schedule"),
            (self.offload_staging_mb != 512, self.streams, "offload_staging_mb", "a schedule: set offload_schedule"),
            (self.offloads, self.enable_prefix_caching, "offloading", "the names that prefix caching gives to chunks: "
             "leave enable_prefix_caching on"),
        ]  # fmt: skip
        for given, met, name, need in needs:
            if given and not met:
                raise ValueError(f"{name} needs {need}")
        if self.streams and remote:
            raise ValueError("offload_schedule streams KV from host memory or disk only: leave out kv_remote_url")
        ranks = self.context_parallel_size * self.tensor_parallel_size
        if ranks > 1 and (outside or self.streams):
            raise ValueError(f"offloading works on one rank: leave out context_parallel_size and tensor_parallel_size "
                             f"({ranks} ranks), or kv_offloading_size, kv_offload_path, kv_remote_url and "
                             f"offload_schedule")  # fmt: skip

    def _check_gpu(self) -> None:
        """Raises ValueError for settings that a GPU cannot follow yet."""
        if self.attention_backend != "triton":
            return
        others = {
            "context_parallel_size": self.context_parallel_size > 1,
            "tensor_parallel_size": self.tensor_parallel_size > 1,
            "kv_cache_dtype": self.kv_cache_dtype == "int8", "quantization": self.quantization != "none",
            "kv_offloading_size": self.kv_offloading_size > 0, "kv_offload_path": self.kv_offload_path is not None,
            "kv_remote_url": self.kv_remote_url is not None, "offload_schedule": self.streams,
        }  # fmt: skip
        for name, given in others.items():
            if given:
                raise ValueError(f"attention_backend 'triton' works without {name} only: leave one of them out")

    def _check_interface(self) -> None:
        try:
            given = ipaddress.IPv4Address(self.rank_interface)
        except ValueError:
            raise ValueError(f"rank_interface must be an IPv4 address, got {self.rank_interface!r}") from None
        if given.is_unspecified or given.is_multicast:
            raise ValueError(f"rank_interface must be the address of one interface, got {self.rank_interface}")

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")

    @staticmethod
    def _finite(name: str, wanted: str, value: Any, fits: Callable[[float], bool]) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and fits(value)):
            raise ValueError(f"{name} must be {wanted} and finite, got {value!r}")


def _check_remote_url(url: str) -> None:
    """Raises ValueError, which does not repeat the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        whole = bool(parts.path) if parts.scheme == "unix" else bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, a bracket too many
        whole = False
    if not whole or parts.scheme not in REMOTE_SCHEMES:
        raise ValueError("kv_remote_url must be redis://HOST:PORT/DB, or rediss, valkey or valkeys in place of redis, "
                         "or unix:///PATH/OF/SOCKET")  # fmt: skip


def env_name(field_name: str) -> str:
    """Environment twin of a field: kv_cache_tokens -> HEADRACE_KV_CACHE_TOKENS."""
    return ENV_PREFIX + field_name.upper()


def parse_field(name: str, text: str) -> Any:
    """Value of the EngineConfig field `name` from its text form. Raises ValueError naming the field."""
    hint = get_type_hints(EngineConfig)[name]
    kinds = [kind for kind in get_args(hint) if isinstance(kind, type)] or [hint]
    if bool in kinds:
        if text.lower() not in ("1", "0", "true", "false", "yes", "no"):
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return text.lower() in ("1", "true", "yes")
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ValueError(
                    f"{name} must be {'an integer' if kind is int else 'a number'}, got {text!r}"
                ) from None
    return text


def config_from_env(**given: Any) -> EngineConfig:
    """EngineConfig from what is given, then the environment, then the defaults."""
    values = dict(given)
    for item in fields(EngineConfig):
        text = os.environ.get(env_name(item.name))
        if text is not None and item.name not in values:
            values[item.name] = parse_field(item.name, text)
    return EngineConfig(**values)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention needs to know of a model. `windows[layer]` is the number of latest keys a row sees (None: all).

    A row at position p with window w attends keys p-w+1 .. p. `alibi` asks for a bias per (query head, key position),
    which the model supplies as a table; see attention.plan.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    alibi: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes
