"""`headrace doctor` on the tiers: what works is measured, what does not is a finding and never an error."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.config import EngineConfig
from headrace.doctor import verdict
from headrace.doctor.machine import tiers
from headrace.doctor.tiers import findings_of
from headrace.offload.tiers import disk_check
from headrace.offload.tiers.disk_check import GIB

pytestmark = pytest.mark.unit

INFO = b"# Server\r\nredis_version:7.4.0\r\nvalkey_version:8.1.0\r\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_check, "PROBE_BYTES", 2 << 20)


def found(**given: Any) -> dict[str, Any]:
    return findings_of(EngineConfig(**given), free_memory=2 * GIB)


@pytest.fixture
def server() -> Iterator[int]:
    """A port where INFO and PING are answered as a server of the protocol does."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            with client, client.makefile("rb") as stream:
                while line := stream.readline():
                    words = [(stream.readline(), stream.readline().strip())[1] for _ in range(int(line[1:]))]
                    client.sendall(answer(words))

    threading.Thread(target=serve, daemon=True).start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def answer(words: list[bytes]) -> bytes:
    known = {b"INFO": b"$%d\r\n%s\r\n" % (len(INFO), INFO), b"PING": b"+PONG\r\n", b"CLIENT": b"+OK\r\n"}
    return known.get(words[0].upper(), b"-ERR unknown command\r\n")


def test_none() -> None:
    assert list(found()) == ["tiers"] and found()["tiers"].startswith("none: set kv_offloading_size")


def test_host_memory() -> None:
    assert found(kv_offloading_size=1)["host memory"] == "1 of 2.0 GiB free"
    assert found(kv_offloading_size=3)["host memory"].endswith("MORE THAN IS FREE")


def test_disk(tmp_path: Path) -> None:
    told = found(kv_offload_path=str(tmp_path), kv_offload_disk_size=0.001, kv_link_gbps=2.0)
    assert told["disk"] == f"{tmp_path}, there, may use 0.001 GiB"
    write, read = (float(rate) for rate in told["disk write, read GB/s"].split(", "))
    assert write > 0 and read > 0 and told["emulated link"] == "2 GB/s, 0 ms"
    assert list(tmp_path.iterdir()) == [], "the measurement left a file"
    told = found(kv_offload_path=str(tmp_path / "deep" / "kv"), kv_offload_disk_size=1e6)
    assert "not there yet" in told["disk"] and told["disk free GiB"].endswith("LESS THAN MAY BE USED")
    assert list(tmp_path.iterdir()) == []


def test_disk_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert "CANNOT BE USED" in found(kv_offload_path=str(tmp_path / "file" / "kv"))["disk"]
    monkeypatch.setattr(disk_check, "PROBE_BYTES", 1 << 60)
    assert found(kv_offload_path=str(tmp_path))["disk rates"] == "not measured: the disk is full"


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_remote(server: int, scheme: str) -> None:
    told = found(kv_remote_url=f"{scheme}://:secret@127.0.0.1:{server}/0?protocol=2")["remote"]
    if scheme == "redis":
        assert "CANNOT BE REACHED" in told, "AUTH is not known here"
    told = found(kv_remote_url=f"{scheme}://127.0.0.1:{server}/0?protocol=2")["remote"]
    assert told.startswith(f"{scheme}://127.0.0.1:{server}/0 answers (8.1.0), round trip ") and "secret" not in told


def test_remote_that_refuses_the_password(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not be started; a remedy names what is wrong."""

    def refuse(*_: object) -> None:
        raise redis.AuthenticationError("invalid username-password pair.")

    monkeypatch.setattr(redis.Redis, "info", refuse)
    told = found(kv_remote_url=f"redis://:secret@127.0.0.1:{server}/0?protocol=2")["remote"]
    assert told == f"redis://127.0.0.1:{server}/0 REFUSES US: invalid username-password pair"
    [warned] = verdict._tiers({"tiers": {"remote": told}})
    assert "the password that the server asks for" in str(warned)


def test_remote_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = found(kv_remote_url=f"redis://u:secret@127.0.0.1:{port}", kv_offload_timeout_s=0.2)["remote"]
    assert "CANNOT BE REACHED" in told and "secret" not in told
    monkeypatch.setitem(sys.modules, "redis", None)
    assert "pip install 'headrace[remote]'" in found(kv_remote_url=f"redis://127.0.0.1:{port}")["remote"]


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_KV_OFFLOAD_PATH", str(tmp_path))
    assert json.dumps(tiers()) and str(tmp_path) in tiers()["disk"]
    monkeypatch.setenv("HEADRACE_KV_TENANT_QUOTA", "7")
    assert tiers() == {"tiers": "cannot be used: kv_tenant_quota must be between 0 and 1 and finite, got 7.0"}


def test_where_serve_keeps_it_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_KV_OFFLOAD_PATH")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    assert (
        tiers()["serve"] == f"keeps KV in {tmp_path}/kv unless kv_offload_path is none"
        and not (tmp_path / "kv").exists()
    )
    monkeypatch.setenv("HEADRACE_KV_OFFLOAD_PATH", "none")
    assert "serve" not in tiers()
