"""Two servers for all clients (tools/clients/servers.py). No client reaches the network or tells home about itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.clients.servers import Server, start

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
for name in ("DO_NOT_TRACK", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[name] = "1"
os.environ["LANGSMITH_TRACING"] = "false"
for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
    os.environ[name] = "none"
for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder: Path = tmp_path_factory.mktemp("servers")
    servers = {kind: start(folder, kind) for kind in ("real", "scripted")}
    try:
        yield {kind: server.wait() for kind, server in servers.items()}
    finally:
        codes = {kind: server.stop() for kind, server in servers.items()}
        (folder / "codes").write_text(repr(codes))
    assert codes == {"real": 0, "scripted": 0}, [server.log.read_text()[-3000:] for server in servers.values()]


@pytest.fixture(scope="session")
def real(started: dict[str, Server]) -> Server:
    """The shipped model: any text, but answers of the shape that was asked for."""
    return started["real"]


@pytest.fixture(scope="session")
def scripted(started: dict[str, Server]) -> Server:
    """A model that calls each tool once and then answers."""
    return started["scripted"]
