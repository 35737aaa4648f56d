"""What tests of the remote tier have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import redis

from headrace.offload.tiers.base import Read, name_of
from headrace.offload.tiers.remote import RemoteTier
from tests.support.redis_servers import Address

T = TypeVar("T")
FAR_S = 20.0
"""Far above every time-out here: a call that takes so long hangs."""
NAMES = [name_of(bytes([i]) * 32, "k") for i in range(40)]
BUDGETS = [None, 1 << 20]


def client(address: Address) -> Any:
    return redis.Redis(host=address[0], port=address[1], protocol=2)


def tier_of(port: int, timeout_s: float = 5.0, **options: Any) -> RemoteTier:
    return RemoteTier(f"redis://127.0.0.1:{port}/0", timeout_s=timeout_s, cooldown_s=0.05, **options)


def blob_of(index: int, size: int) -> bytes:
    return (bytes([index, 255 - index]) * size)[:size]


def whole(tier: RemoteTier, name: bytes, size: int) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if tier.read([Read(name, 0, memoryview(into))]) == [True] else None


def in_time(call: Callable[[], T]) -> T:
    """The call's result; fails if it does not end."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    assert wait([done], FAR_S).done, "the call hangs"
    return done.result()
