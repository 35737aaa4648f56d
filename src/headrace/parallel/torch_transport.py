"""Transport of tensors in main memory over a torch.distributed process group of gloo. Those of a GPU go by
parallel.staged_transport, through this, or by parallel.nccl_transport.

What gloo (torch 2.13) is like, and what follows from it:
- a message leaves when its receive has been posted, so a send waits for the other side;
- whether a transfer is complete is known only to who waits for it, and waiting cannot be interrupted: so a thread waits
  for each, and callers wait for that thread. It also relays what arrived while its receiver computes;
- a wait that times out closes all links of the group: so there are no timeouts here. That a rank hangs is noticed over
  the control link (parallel.supervisor), which then calls `fail`;
- tags are below 2**31. Sizes are not compared: a message shorter than its receive leaves the rest of it untouched, a
  longer one ends the receiving process. The loopback of parallel.transport finds such mistakes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from headrace.parallel.transport import RankLost, Tag, Traffic, Transfer, check_sent, flat
from headrace.parallel.waiters import Waiters


class TorchTransport:
    """One rank's end of the links of a process group. Ranks are numbered as in the group.

    `name_of(rank)` says how a rank is called in errors; by default by its number in the world.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, name_of: Callable[[int], str] | None = None) -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.traffic = Traffic()
        self.broken: str | None = None
        self._name_of = name_of or (lambda rank: f"rank {dist.get_global_rank(self.group, rank)}")
        self._waiters = Waiters("headrace-link")
        self._lock = threading.Lock()
        self._under_way: set[_TorchTransfer] = set()

    def isend(self, x: Tensor, to: int, tag: Tag) -> Transfer:
        """Raises ValueError for an empty or a scattered tensor, RankLost at once where a link is known to be gone."""
        check_sent(x)
        self.traffic.sent(to, x)
        return self._begin(to, "to", lambda: self.group.send([flat(x)], to, tag.number))

    def irecv(self, x: Tensor, source: int, tag: Tag, relay: int | None = None) -> Transfer:
        """As isend."""
        check_sent(x)
        after = None if relay is None else lambda: self.isend(x, relay, tag)
        return self._begin(source, "from", lambda: self.group.recv([flat(x)], source, tag.number), after)

    def fail(self, why: str) -> None:
        """Everybody who waits, and who will, gets RankLost(why). The first reason stays."""
        with self._lock:
            self.broken = self.broken or why
            lost, self._under_way = self._under_way, set()
        for transfer in lost:
            transfer.finish(self.broken)

    def settle(self, seconds: float) -> bool:
        """Waits until nothing is under way; whether that was so in time."""
        end = time.monotonic() + seconds
        while self._under_way and time.monotonic() < end:
            time.sleep(0.005)
        return not self._under_way

    def close(self, timeout_s: float = 2.0) -> bool:
        """Fails what is under way and ends the threads; whether all have ended in that time: one that waits for a rank
        that still runs does not. The process group is left to its owner."""
        self.fail("the link was closed")
        return self._waiters.close(timeout_s)

    def _begin(
        self, other: int, way: str, post: Callable[[], Any], after: Callable[[], Transfer] | None = None
    ) -> Transfer:
        transfer = _TorchTransfer(self)
        with self._lock:
            if self.broken:
                raise RankLost(self.broken)
            self._under_way.add(transfer)
        try:
            handle = post()
        except RuntimeError as error:
            self._lost(other, way, error)
            raise RankLost(self.broken) from error
        self._waiters.run(lambda: self._attend(transfer, handle, other, way, after))
        return transfer

    def _attend(
        self,
        transfer: _TorchTransfer,
        handle: Any,
        other: int,
        way: str,
        after: Callable[[], Transfer] | None,
    ) -> None:
        try:
            handle.wait()
        except RuntimeError as error:
            self._lost(other, way, error)
            return
        try:
            transfer.relayed = after() if after is not None else None
        except RankLost as error:
            transfer.finish(str(error))
        with self._lock:
            self._under_way.discard(transfer)
        transfer.finish(None)

    def _lost(self, other: int, way: str, error: RuntimeError) -> None:
        cause = str(error).split("] ", 1)[-1].split(". This is typically", 1)[0]
        self.fail(f"{self._name_of(other)} is gone (transfer {way} it: {cause})")


class _TorchTransfer:
    """A Transfer. `relayed` is the send that carries on what was received."""

    def __init__(self, end: TorchTransport) -> None:
        self._end = end
        self._event = threading.Event()
        self._error: str | None = None
        self.relayed: Transfer | None = None

    def finish(self, error: str | None) -> None:
        if not self._event.is_set():
            self._error = error
            self._event.set()

    @property
    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        if not self._event.is_set():
            began = time.perf_counter()
            self._event.wait()
            self._end.traffic.wait_s += time.perf_counter() - began
        if self._error is not None:
            raise RankLost(self._error)

    def drain(self) -> None:
        self.wait()
        if self.relayed is not None:
            self.relayed.wait()
