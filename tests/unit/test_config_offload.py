"""Settings of the tiers: what cannot work is refused with its name and the remedy, alone and together."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import EngineConfig, config_from_env
from headrace.config.tiers import RemoteTierSettings

pytestmark = pytest.mark.unit

HOST: dict[str, Any] = {"kv_offloading_size": 1.0}
DISK: dict[str, Any] = {"kv_offload_path": "/kv"}
REMOTE: dict[str, Any] = {"kv_remote_url": "redis://127.0.0.1:6379/0"}
NAN, INF = float("nan"), float("inf")

NUMBERS: dict[str, tuple[Any, ...]] = {
    "kv_offloading_size": (-0.1, NAN, INF, True, "4 apples", None),
    "kv_offload_disk_size": (-1, NAN, INF, True),
    "kv_remote_size": (-1, NAN, INF, True),
    "kv_offload_timeout_s": (0, -1, NAN, INF, True),
    "kv_offload_queue_mb": (0, -1, 1.5, True),
    "kv_tenant_quota": (-0.01, 1.01, NAN, INF, True),
    "kv_link_gbps": (0, -1, NAN, INF, True),
    "kv_link_latency_ms": (-0.1, NAN, INF, True),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, bad in NUMBERS.items() for value in bad])
def test_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be "):
        EngineConfig(**{**HOST, **DISK, name: value})


@pytest.mark.parametrize(
    "name",
    [
        "kv_host_format",
        "kv_disk_format",
        "kv_remote_format",
        "kv_offload_activations",
        "kv_offload_write",
        "offload_schedule",
    ],
)
def test_choices(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be one of .*got 'other'"):
        EngineConfig(**{**HOST, name: "other"})


URLS = ["redis://h:6379/0", "redis://h", "rediss://u:p@h:1/2", "valkey://h:6379", "valkeys://h", "unix:///run/kv.sock",
        "unix:///run/kv.sock?db=1", "redis://[::1]:6379/0"]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_urls(url: str) -> None:
    assert EngineConfig(kv_remote_url=url).tiers is not None


def test_valkey_speaks_the_same_protocol() -> None:
    for given, url in (("valkey://u:p@h:1/0", "redis://u:p@h:1/0"), ("valkeys://h", "rediss://h"),
                       ("redis://valkey", "redis://valkey"), ("unix:///valkey", "unix:///valkey")):  # fmt: skip
        assert RemoteTierSettings(url=given).redis_url == url


@pytest.mark.parametrize(
    "url",
    ["", "h:6379", "http://u:secret@h/0", "redis://", "redis:///0", "redis://h:70000", "redis://u:secret@h:port/0",
     "unix://", "redis://[::1", "redis://h:0", "file:///kv", "redis://h:1/x", "valkeys://h/-1"],
)  # fmt: skip
def test_bad_urls_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"^kv_remote_url must be redis://HOST:PORT/DB") as error:
        EngineConfig(kv_remote_url=url)
    assert "secret" not in str(error.value)


TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"kv_host_format": "int8", **DISK}, "kv_host_format needs .*set kv_offloading_size"),
    ({"kv_disk_format": "int4", **HOST}, "kv_disk_format needs .*set kv_offload_path"),
    ({"kv_remote_format": "int4", **DISK}, "kv_remote_format needs .*set kv_remote_url"),
    ({"kv_offload_disk_size": 1.0, **HOST}, "kv_offload_disk_size needs .*set kv_offload_path"),
    ({"kv_offload_disk_size": 0.0, **DISK}, "kv_offload_path needs room: raise kv_offload_disk_size"),
    ({"kv_remote_size": 1.0, **DISK}, "kv_remote_size needs a server: set kv_remote_url"),
    ({"kv_offload_write": "idle"}, "kv_offload_write needs a tier"),
    ({"kv_offload_path": "none", "kv_offload_disk_size": 1.0}, "kv_offload_disk_size needs .*set kv_offload_path"),
    ({"kv_offload_activations": "on"}, "kv_offload_activations needs a tier"),
    ({"kv_offload_activations": "off"}, "kv_offload_activations needs a tier"),
    ({"kv_link_gbps": 3.0}, "kv_link_gbps needs a tier"),
    ({"kv_link_latency_ms": 0.1}, "kv_link_latency_ms needs a tier"),
    ({"kv_offload_path": " "}, "kv_offload_path must name a directory"),
    ({"offload_schedule": "row"}, "offload_schedule needs a place for KV"),
    ({"offload_schedule": "auto", **REMOTE}, "offload_schedule needs a place for KV"),
    ({"offload_schedule": "column", **HOST, **REMOTE}, "Leave out kv_remote_url or offload_schedule"),
    ({"weight_offload": True, **HOST}, "weight_offload needs a schedule: set offload_schedule"),
    ({"offload_x_resident": True, **HOST}, "offload_x_resident needs a schedule"),
    ({"offload_batches": 2, **HOST}, "offload_batches needs a schedule"),
    ({"offload_staging_mb": 64, **HOST}, "offload_staging_mb needs a schedule"),
    (
        {"enable_prefix_caching": False, **HOST},
        "Leave out kv_offloading_size or --no-enable-prefix-caching",
    ),
]


@pytest.mark.parametrize(("given", "told"), TOGETHER)
def test_together(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EngineConfig(**given)


def test_what_works() -> None:
    assert EngineConfig().tiers is None and EngineConfig().streaming is None
    assert EngineConfig(kv_offload_path="none") == EngineConfig()
    for given in (HOST, DISK, REMOTE, {**HOST, **DISK, **REMOTE, "kv_disk_format": "int8", "kv_link_gbps": 3}):
        assert EngineConfig(**given).tiers is not None
    tiers = [EngineConfig(**given).tiers for given in (HOST, DISK, REMOTE, {**HOST, **DISK})]
    assert [own is not None and own.outlive for own in tiers] == [False, True, True, True]
    for schedule in ("row", "column", "auto"):
        streamed = EngineConfig(offload_schedule=schedule, weight_offload=True, enable_prefix_caching=False, **HOST)
        assert streamed.streaming is not None and streamed.tiers is None
    for quota in (0, 1, 0.25):
        assert EngineConfig(**HOST, kv_tenant_quota=quota).tiers.tenant_quota == quota


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KV_OFFLOADING_SIZE", "2.5")
    monkeypatch.setenv("HEADRACE_KV_LINK_GBPS", "0.5")
    monkeypatch.setenv("HEADRACE_OFFLOAD_SCHEDULE", "row")
    monkeypatch.setenv("HEADRACE_WEIGHT_OFFLOAD", "true")
    given = config_from_env().streaming
    assert given is not None and (given.host.size, given.link.gbps, given.weights) == (2.5, 0.5, True)
    monkeypatch.setenv("HEADRACE_KV_TENANT_QUOTA", "half")
    with pytest.raises(ValueError, match="HEADRACE_KV_TENANT_QUOTA must be a number"):
        config_from_env()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (dict(sessions_size=1), "sessions_size needs a directory: set sessions_dir"),
        (dict(sessions_tenant_share=0.1), "sessions_tenant_share needs a directory"),
        (dict(sessions_per_tenant=3), "sessions_per_tenant needs a directory"),
        (dict(sessions_dir="x", enable_prefix_caching=False), "sessions_dir needs enable_prefix_caching"),
        (dict(num_speculative_tokens=5), "num_speculative_tokens needs drafts: set speculative"),
        (
            dict(offload_schedule="row", kv_offloading_size=0.1, offload_batches=3),
            "offload_batches needs groups of sequences: set offload_schedule column",
        ),
        (
            dict(offload_schedule="row", kv_offloading_size=0.1, kv_offload_write="idle"),
            "kv_offload_write needs a tier",
        ),
        (dict(kv_tenant_quota=0.1), "kv_tenant_quota needs a tier"),
        (dict(kv_offload_queue_mb=3), "kv_offload_queue_mb needs a tier"),
        (dict(kv_offload_timeout_s=3.0), "kv_offload_timeout_s needs a tier"),
        (dict(offload_schedule="row", kv_offloading_size=0.1, kv_tenant_quota=0.1), "kv_tenant_quota needs a tier"),
        (dict(enable_prefix_caching=False, max_pinned_share=0.1), "max_pinned_share needs enable_prefix_caching"),
        (dict(enable_prefix_caching=False, cache_control_pins=4), "cache_control_pins needs enable_prefix_caching"),
        (dict(enable_prefix_caching=False, public_prefix_file="x"), "public_prefix_file needs enable_prefix_caching"),
        (
            dict(distributed_backend="ray"),
            r"distributed_backend needs several ranks: set context_parallel_size \(-cp\) or",
        ),
        (dict(rank_interface="10.0.0.1"), "rank_interface needs several ranks"),
        (dict(rank_transport="host"), "rank_transport needs several ranks"),
        (dict(rank_timeout_s=2.0), "rank_timeout_s needs several ranks"),
        (
            dict(prefill_strategy="chain"),
            "prefill_strategy chain needs several context ranks: set context_parallel_size",
        ),
        (
            dict(prefill_strategy="ring-q", tensor_parallel_size=2),
            "prefill_strategy ring-q needs several context ranks",
        ),
        (dict(parallel_table="table.json"), "parallel_table needs several context ranks"),
        (dict(strategy_rule="alg1"), "strategy_rule needs several context ranks"),
        (
            dict(context_parallel_size=2, strategy_rule="alg1", prefill_strategy="chain"),
            "strategy_rule needs a choice of the planner: leave out prefill_strategy",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EngineConfig(**values)


def test_one_rank_computes_every_prompt_as_single_asks() -> None:
    assert EngineConfig(prefill_strategy="single").ranks.strategy == "single"
