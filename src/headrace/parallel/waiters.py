"""Threads that wait for transfers: taken when one is needed, kept for the next, never a limit to how many wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Task = Callable[[], None]

END_S = 2.0


class Waiters:
    """`run(task)` runs the task at once on a thread of its own. Threads are reused; `close` ends the idle ones.

    A bounded pool could deadlock: its threads may all wait for messages that arrive after one nobody waits for.
    The threads are daemons, since one whose peer is gone may never return.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._idle = 0
        self._threads = 0
        self._closed = False

    @property
    def threads(self) -> int:
        """Threads that exist now."""
        return self._threads

    def run(self, task: Task) -> None:
        """Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} are closed")
            started = self._idle == 0
            if started:
                self._threads += 1
            else:
                self._idle -= 1
        if started:
            threading.Thread(target=self._work, args=(task,), name=self._name, daemon=True).start()
        else:
            self._tasks.put(task)

    def close(self) -> None:
        """Waits END_S for the threads: one that comes out of torch while the interpreter ends would abort the process."""
        with self._ended:
            self._closed = True
            for _ in range(self._idle):
                self._tasks.put(None)
            self._idle = 0
            self._ended.wait_for(lambda: self._threads == 0, END_S)

    def _work(self, task: Task | None) -> None:
        while task is not None:
            task()
            with self._lock:
                if self._closed:
                    break
                self._idle += 1
            task = self._tasks.get()
        with self._ended:
            self._threads -= 1
            self._ended.notify_all()
