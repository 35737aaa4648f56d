"""A pool of threads without a limit, for waiting on transfers: a thread is reused when it is idle."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], None]


class Waiters:
    """`run(task)` runs the task at once on a thread of its own. Threads are reused until `close`.

    A bounded pool could deadlock: its threads may all wait for messages that arrive after one nobody waits for.
    The threads are daemons, since one whose peer is gone may never return.
    """

    def __init__(self, name: str, enter: Task = lambda: None) -> None:
        """enter: what each thread does first."""
        self._name, self._enter = name, enter
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @property
    def threads(self) -> int:
        """Threads that exist now."""
        return len(self._threads)

    def run(self, task: Task) -> None:
        """Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} are closed")
            self._tasks.put(task)
            if self._idle:
                self._idle -= 1
                return
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def close(self, timeout_s: float = 0.0) -> bool:
        """Lets the threads end, and waits for that for so long; whether they all have. May be called again.

        A thread that is in torch when the interpreter ends would abort the process: give them time before that.
        """
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._tasks.put(None)
            self._idle = 0
            left = [thread for thread in self._threads if thread is not threading.current_thread()]
        end = time.monotonic() + timeout_s
        for thread in left:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in left)

    def _work(self) -> None:
        self._enter()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # and what it refers to, before this thread rests
            with self._lock:
                if self._closed:
                    break
                self._idle += 1
        with self._lock:
            self._threads.discard(threading.current_thread())
