"""Settings by room: flat names outside, records inside, and the way between them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from headrace.config import SETTINGS, EngineConfig, KVStreaming, KVTiers
from headrace.config.tiers import TIERS

pytestmark = pytest.mark.unit

OTHER: dict[str, Any] = {
    "model": "/models/x", "threads": 3, "kv_cache_tokens": 4096, "max_sequences": 7, "context_parallel_size": 2,
    "rank_timeout_s": 2.5, "served_model_name": "x", "port": 99, "api_key": "key",
}  # fmt: skip


STREAMING = {"kv_offloading_size": 1, "offload_schedule": "row"}


@pytest.mark.parametrize("given", [{}, OTHER, {"kv_offload_path": "/kv"}, STREAMING])
def test_flat_values_make_the_same_settings_again(given: dict[str, Any]) -> None:
    config = EngineConfig(**given)
    assert EngineConfig(**config.flat) == config == pickle.loads(pickle.dumps(config))
    assert given.items() <= config.flat.items() and config.flat.keys() == SETTINGS.keys()
    assert config.replace(port=1).server.port == 1 and config.replace(port=1).flat == config.flat | {"port": 1}


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, True])
def test_a_seed_that_no_request_may_have_is_refused(seed: int) -> None:
    assert EngineConfig(seed=2**63 - 1).scheduler.seed == 2**63 - 1
    with pytest.raises(
        ValueError, match="seed must be an integer between -9223372036854775808 and 9223372036854775807"
    ):
        EngineConfig(seed=seed)


def test_each_setting_is_read_where_it_says() -> None:
    config = EngineConfig(**OTHER)
    rooms = {type(room): room for room in (config.model, config.cache, config.scheduler, config.ranks, config.server)}
    for name, value in OTHER.items():
        assert getattr(rooms[SETTINGS[name].record], SETTINGS[name].field) == value


def test_unknown_names_and_assignments_are_refused() -> None:
    with pytest.raises(TypeError, match="unknown setting 'kv_cache_token'; did you mean kv_cache_tokens"):
        EngineConfig(kv_cache_token=5)
    with pytest.raises(AttributeError):
        EngineConfig().server.port = 1  # type: ignore[misc]


def test_kv_outside_the_pool_is_one_thing() -> None:
    host, disk = {"kv_offloading_size": 1.0}, {"kv_offload_path": "/kv"}
    assert EngineConfig().outside is None
    tiers = EngineConfig(**host, **disk).outside
    assert isinstance(tiers, KVTiers) and [tier.kind for tier in tiers.each] == ["host", "disk"]
    assert tiers.formats == ("raw", "raw", "raw")
    streamed = EngineConfig(**host, **disk, offload_schedule="row").outside
    assert isinstance(streamed, KVStreaming) and streamed.path == "/kv"
    assert streamed.room == ("kv_offloading_size", 1.0)


def test_the_batch_follows_the_ranks() -> None:
    sizes = [EngineConfig(context_parallel_size=ranks).scheduler.max_batch_tokens for ranks in (1, 2)]
    assert sizes == [2048, 16384] and EngineConfig(max_batch_tokens=5).scheduler.max_batch_tokens == 5


def test_every_tier_says_how_it_is_opened() -> None:
    assert len({tier.kind for tier in TIERS}) == len(TIERS)
    for tier in TIERS:
        module, _, function = tier.opens.partition(":")
        assert module == f"headrace.offload.tiers.{tier.kind}" and function
        assert tier.switch in SETTINGS and SETTINGS[tier.switch].record is tier
