"""`prompt_progress` of a stream (llama.cpp's name and fields): how far the prompt of a request is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.progress import Prefill
from headrace.server.engine import ServedEngine
from headrace.server.job import Job


class PromptProgress:
    """Called now and then: what is to be told, None where nothing has changed or all prompts are read.

    total, cache, processed: tokens of all prompts of the job; processed counts the cached ones too. time_ms: since the
    first of them began to be read. left_s: seconds until all are, null while nobody knows.
    """

    def __init__(self, job: Job, engine: ServedEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._engine, self._clock = job, engine, clock
        self._ids = [job.prompt_id(p) for p in range(len(job.prompts))]
        self._cached = dict.fromkeys(self._ids, 0)
        self._done = dict.fromkeys(self._ids, 0)
        self._began_s: float | None = None
        self._told: tuple[int, int] | None = None

    def __call__(self) -> dict[str, Any] | None:
        reading = {each.request_id: each for each in self._engine.prefills}
        own = [reading[name] for name in self._ids if name in reading]
        for each in own:  # one that is read again, or whose answer is on its way, does not fall back
            self._cached[each.request_id] = each.cached
            self._done[each.request_id] = max(self._done[each.request_id], each.done)
        if own and self._began_s is None:
            self._began_s = self._clock()
        processed = sum(map(self._processed, range(len(self._ids))))
        told = sum(self._cached.values()), processed
        if told == self._told or processed == self._job.prompt_tokens:
            return None
        self._told = told
        return {
            "total": self._job.prompt_tokens,
            "cache": told[0],
            "processed": processed,
            "time_ms": 0 if self._began_s is None else round((self._clock() - self._began_s) * 1000),
            "left_s": self._left_s(own, list(reading.values())),
        }

    def _processed(self, p: int) -> int:
        answered = self._job.choices[p * self._job.n].last_s
        return len(self._job.prompts[p].ids) if answered else self._done[self._ids[p]]

    def _left_s(self, own: list[Prefill], all_read: list[Prefill]) -> float | None:
        """Prompts are read in order of arrival: those before the job's last one come first."""
        rate = self._engine.prefill_rate
        if len(own) < len(self._ids) or not rate:
            return None
        last = max(all_read.index(each) for each in own)
        return round(sum(each.total - each.done for each in all_read[: last + 1]) / rate, 3)
