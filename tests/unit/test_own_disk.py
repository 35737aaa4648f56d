"""The user's cache directory as the default place of `headrace serve`: where, how much, and when there is none."""

from __future__ import annotations

import logging
import os
from collections import namedtuple
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from headrace.cli import main
from headrace.config import EngineConfig
from headrace.config.tiers import DISK_GIB
from headrace.offload.tiers import own_disk
from headrace.offload.tiers.index import Index, stored_bytes
from headrace.offload.tiers.own_disk import is_own, kv_folder, resolved
from headrace.server.start import tier_lines
from headrace.server.state import MakeEngine
from tests.support.fake_engine import FakeCapacity

pytestmark = pytest.mark.unit

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home with 100 GiB of room; nothing in the environment names another place."""
    for name in ("HEADRACE_KV_OFFLOAD_PATH", "HEADRACE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    room(monkeypatch, 100)
    return tmp_path


def room(patch: pytest.MonkeyPatch, gib: float) -> None:
    patch.setattr("shutil.disk_usage", lambda path: Usage(0, 0, int(gib * GIB)))


def auto(**settings: Any) -> EngineConfig:
    return resolved(EngineConfig(kv_offload_path="auto", **settings))


def disk_of(config: EngineConfig) -> tuple[str, float]:
    assert config.tiers is not None
    (own,) = (each for each in config.tiers.each if each.kind == "disk")
    return own.place, own.size


def test_place_size_and_mode(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / ".cache" / "headrace" / "kv"
    config = auto()
    assert disk_of(config) == (str(folder), 20.0) and is_own(str(folder)), "a fifth of what is free"
    assert config.tiers is not None and config.tiers.write == "sparing"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    room(monkeypatch, 1000)
    assert disk_of(auto())[1] == DISK_GIB and folder.stat().st_mode & 0o777 == 0o700
    assert resolved(config) is config


@pytest.mark.parametrize(("name", "below"), [("XDG_CACHE_HOME", "headrace/kv"), ("HEADRACE_CACHE_DIR", "kv")])
def test_other_places(name: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(tmp_path / "other"))
    assert disk_of(auto())[0] == str(tmp_path / "other" / below)


def test_a_relative_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", "mine")
    assert disk_of(auto())[0] == str(tmp_path / "mine" / "kv")


def test_what_was_given_holds(home: Path) -> None:
    config = auto(kv_offload_disk_size="500GiB", kv_disk_format="int8", kv_offload_write="ended")
    assert disk_of(config)[1] == 500 and config.tiers is not None
    assert config.tiers.write == "ended" and config.tiers.each[0].format == "int8"
    assert auto(kv_offload_disk_size=0.5).tiers is not None, "less than the least, but asked for"
    assert auto(kv_offload_disk_size=0).tiers is None
    both = auto(kv_offloading_size=1)
    assert both.tiers is not None and [own.kind for own in both.tiers.each] == ["host", "disk"]


def test_what_is_stored_counts_as_free(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto()
    index = Index(str(kv_folder() / "index.sqlite"), 1 << 50, 1.0)
    index.reserve(b"a", b"", 50 * GIB)
    index.close()
    assert stored_bytes(kv_folder() / "index.sqlite") == 50 * GIB
    room(monkeypatch, 10)
    assert disk_of(auto())[1] == 12
    (kv_folder() / "index.sqlite").write_bytes(b"no index" * 1000)
    assert disk_of(auto())[1] == 2


def test_what_is_said_of_tiers_goes_with_the_directory(home: Path) -> None:
    """A start without it is none the worse."""
    said = dict(kv_tenant_quota=0.1, kv_offload_timeout_s=3.0, kv_offload_write="idle")
    tiers = auto(**said).tiers
    assert tiers is not None and (tiers.tenant_quota, tiers.timeout_s, tiers.write) == (0.1, 3.0, "idle")
    assert auto(**said, kv_offload_disk_size=0).tiers is None


OTHERS: list[dict[str, Any]] = [
    {"offload_schedule": "row", "kv_offloading_size": 1}, {"enable_prefix_caching": False},
    {"context_parallel_size": 2, "distributed_backend": "ray"}, {"attention_backend": "triton"},
]  # fmt: skip


@pytest.mark.parametrize("settings", OTHERS)
def test_other_settings_leave_no_place(settings: dict[str, Any], home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert auto(**settings).tiers is None and not (home / ".cache").exists() and not caplog.text
    with pytest.raises(ValueError, match="kv_offload_disk_size needs a directory"):
        auto(**settings, kv_offload_disk_size=3)


@pytest.mark.parametrize("settings", [{"context_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_ranks_of_this_host_share_it(settings: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_of(auto(**settings))[0] == str(kv_folder())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert disk_of(auto(**settings))[0] == str(kv_folder())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert auto(**settings).tiers is None, "the other rank is on another host"


def test_a_remote_tier_is_enough(home: Path) -> None:
    config = auto(kv_remote_url="redis://h")
    assert config.tiers is not None and [own.kind for own in config.tiers.each] == ["remote"]
    assert not (home / ".cache").exists()


def unwritable(home: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    return "nothing can be written to ~/.cache/headrace/kv (Read-only file system)"


def a_file(home: Path, patch: pytest.MonkeyPatch) -> str:
    (home / ".cache").write_text("")
    return "~/.cache/headrace/kv is not a directory"


def of_another(home: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr("os.geteuid", lambda: os.getuid() + 1)
    return "~/.cache/headrace/kv belongs to another user"


def full(home: Path, patch: pytest.MonkeyPatch) -> str:
    room(patch, 4.9)
    return "20% of what is free at ~/.cache/headrace/kv is less than 1 GiB"


def homeless(home: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    return "the user has no home directory"


def odd_home(home: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Path, "home", lambda: Path("somewhere"))
    return "the user's home is no absolute path"


@pytest.mark.parametrize("make", [unwritable, a_file, of_another, full, homeless, odd_home])
def test_an_unusable_place_is_told_and_done_without(
    make: Any, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        told = make(home, patch)
        assert auto(kv_disk_format="int8").tiers is None
    assert f"KV is not kept on disk: {told}; --kv-offload-path DIR" in caplog.text


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    seen: list[EngineConfig] = []

    def serve(config: EngineConfig, make_engine: MakeEngine) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("headrace.server.serve.serve", serve)
    monkeypatch.setattr("headrace.engine.process.EngineStart", Mock)
    monkeypatch.setattr("headrace.cli.generate.run", lambda config, *_, **__: seen.append(config))
    monkeypatch.setattr("headrace.engine.preflight.check", lambda config: None)
    return seen


def test_by_default_for_serve_alone(served: list[EngineConfig], home: Path) -> None:
    def run(*arguments: str, **env: str) -> str | None:
        ran = CliRunner().invoke(main.app, arguments, env=env)
        assert ran.exit_code == 0, ran.stderr
        config = served.pop()
        return disk_of(config)[0] if config.tiers is not None else None

    own = str(home / ".cache" / "headrace" / "kv")
    assert run("serve", "tiny") == run("serve", "--kv-offload-disk-size", "3") == own
    assert run("generate", "hi") is None and run("generate", "hi", "--kv-offload-path", "auto") == own
    assert run("serve", "--kv-offload-path", "none") is None and run("serve", HEADRACE_KV_OFFLOAD_PATH="none") is None
    assert run("serve", HEADRACE_KV_OFFLOAD_PATH="/kv") == "/kv"
    assert run("serve", "--kv-offload-path", "none", HEADRACE_KV_OFFLOAD_PATH="/kv") is None


def test_the_start_says_how_to_switch_it_off(home: Path) -> None:
    (told,) = tier_lines(FakeCapacity(), auto())
    assert told.startswith("disk ~/.cache/headrace/kv: 20 GiB, about ")
    assert told.endswith(" tokens; off by --kv-offload-path none")
    (told,) = tier_lines(FakeCapacity(), auto(kv_disk_format="int8"))
    assert told.endswith(" tokens, stored as int8; off by --kv-offload-path none")
    (told,) = tier_lines(FakeCapacity(), EngineConfig(kv_offload_path="/kv"))
    assert told.endswith("stored as raw")


def test_the_start_of_several_ranks() -> None:
    """A token's bytes are those of one tensor rank: on disk are those of both."""
    told = tier_lines(
        FakeCapacity(kv_cache_dtype="bfloat16"),
        EngineConfig(kv_offload_path="/kv", kv_offloading_size=2, context_parallel_size=3, tensor_parallel_size=2),
    )
    assert told == [
        f"host memory: 2 GiB a rank, about {3 * 2 * 2**20:,} tokens, stored as raw",
        f"disk /kv: 32 GiB, about {32 * 2**19:,} tokens, stored as raw",
    ]


def test_streaming_from_no_directory() -> None:
    config = EngineConfig(kv_offload_path="none", kv_offloading_size=1, offload_schedule="row")
    assert config.streaming is not None and config.streaming.path is None
    assert own_disk.SHARE * 5 == own_disk.LEAST_GIB
