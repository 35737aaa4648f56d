"""The ranks of an engine as threads of this process: LLM(context_parallel_size=2) starts no process and opens no link.

Everything else is the engine's own: headrace.engine.ranks makes each rank, its share of the weights and its tiers.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from headrace.config import EngineConfig
from headrace.parallel import launch, measure, messages
from headrace.parallel.transport import Loopback, LoopbackHub, RankLost
from headrace.parallel.worker import decode_config, encode_config, named
from tests.support.rank_threads import MACHINE

ENDS_S = 20.0


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Within, engines have their ranks as threads, and their planner goes by a made-up machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "open_group", open_group)
        patch.setattr(measure, "take_part", lambda rank, tensor=1: MACHINE)
        yield


class ThreadStore:
    """In place of headrace.parallel.link_store.LinkStore."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, ENDS_S)
            return self._values[key].encode()


@dataclass
class ThreadGroup:
    """A rank's place among the others: see headrace.parallel.group.Group."""

    rank: int
    size: int
    context: Loopback
    tensor: Loopback
    store: ThreadStore
    workers: ThreadWorkers | None = None

    def released(self) -> bool:
        return True

    def close(self) -> bool:
        if self.workers is not None:
            self.workers.close()
        return True


def open_group(config: EngineConfig, maker: str, start: object = None) -> ThreadGroup:
    """In place of headrace.parallel.launch.open_group."""
    context, tensor = config.ranks.context, config.ranks.tensor
    outer = [LoopbackHub(context) for _ in range(tensor)]
    inner = [LoopbackHub(tensor) for _ in range(context)]
    store = ThreadStore()
    groups = [
        ThreadGroup(c * tensor + t, context * tensor, outer[t].transport(c), inner[c].transport(t), store)
        for c in range(context)
        for t in range(tensor)
    ]
    groups[0].workers = ThreadWorkers(config, maker, groups[1:], outer + inner)
    return groups[0]


@dataclass
class _Worker:
    """inbox: steps and commands in the order sent, which `steps` are taken from: what is told before a step is known in
    it."""

    inbox: queue.SimpleQueue[tuple[bool, bytes] | None] = field(default_factory=queue.SimpleQueue)
    steps: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    made: Any = None


class ThreadWorkers:
    """In place of headrace.parallel.supervisor.WorkerSupervisor: of each worker one thread computes its steps and one
    reads what is sent and obeys the commands to its tiers, as in a worker's process."""

    def __init__(self, config: EngineConfig, maker: str, groups: list[ThreadGroup], hubs: list[LoopbackHub]) -> None:
        self.failed = threading.Event()
        self.reason: str | None = None
        self.on_answer: Callable[[int, bytes], None] | None = None
        self._hubs = hubs
        self._callbacks: list[Callable[[str], None]] = []
        self._ready = threading.Semaphore(0)
        self._workers = {group.rank: _Worker() for group in groups}
        self.pids = dict.fromkeys(self._workers, os.getpid())
        for group in groups:
            worker = self._workers[group.rank]
            for work in (self._compute, self._obey):
                thread = threading.Thread(target=self._guarded, args=(work, worker, group, config, maker), daemon=True)
                worker.threads.append(thread)
        for worker in self._workers.values():
            worker.threads[0].start()

    @property
    def made(self) -> list[Any]:
        """The workers' ranks."""
        return [worker.made for worker in self._workers.values()]

    def _guarded(self, work: Callable[..., None], worker: _Worker, group: ThreadGroup, *given: Any) -> None:
        try:
            work(worker, group, *given)
        except BaseException as error:
            self._fail(f"rank {group.rank} failed: {type(error).__name__}: {error}")

    def _compute(self, worker: _Worker, group: ThreadGroup, config: EngineConfig, maker: str) -> None:
        torch.set_num_threads(1)
        worker.made = named(maker)(decode_config(encode_config(config)), group)  # type: ignore[arg-type]
        worker.threads[1].start()
        self._ready.release()
        while (body := worker.steps.get()) is not None:
            worker.made.run(messages.decode(body))

    def _obey(self, worker: _Worker, group: ThreadGroup, *_: Any) -> None:
        def answer(body: bytes) -> None:
            assert self.on_answer is not None
            self.on_answer(group.rank, body)

        while (message := worker.inbox.get()) is not None:
            step, body = message
            if step:
                worker.made.fence.sent()
                worker.steps.put(body)
            else:
                worker.made.obey(body, answer)
        worker.steps.put(None)

    def _fail(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.failed.set()
        for hub in self._hubs:
            hub.fail(reason)
        for callback in self._callbacks:
            callback(reason)
        self._ready.release(len(self._workers))

    def on_failure(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)
        if self.reason is not None:
            callback(self.reason)

    def check(self) -> None:
        if self.reason is not None:
            raise RankLost(self.reason)

    def wait_ready(self, timeout_s: float | None = None) -> dict[int, bytes]:
        for _ in self._workers:
            self._ready.acquire()
        self.check()
        return dict.fromkeys(self._workers, b"")

    def send(self, step: bytes) -> None:
        self.check()
        for worker in self._workers.values():
            worker.inbox.put((True, step))

    def send_to(self, rank: int, command: bytes) -> None:
        self.check()
        self._workers[rank].inbox.put((False, command))

    def close(self) -> None:
        """Ends all threads. Messages that no rank has received are an error unless a rank has failed."""
        for worker in self._workers.values():
            worker.inbox.put(None)
        threads = [thread for worker in self._workers.values() for thread in worker.threads if thread.ident]
        for thread in threads:
            thread.join(ENDS_S)
        if any(thread.is_alive() for thread in threads):
            self._fail("a rank waits for what nobody sends")
            for thread in threads:
                thread.join(ENDS_S)
        assert self.reason or not any(hub.left_over() for hub in self._hubs), "messages that nobody received"
