"""Files of saved sessions: whatever lies there is loaded with the right bits or refused, and no chunk is lost."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from random import Random

from headrace import LLM, SamplingParams
from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import LoadSession
from headrace.engine.session_calls import sessions_of
from headrace.types import CHUNK, InvalidRequest
from tools.fuzz.doors import Door
from tools.fuzz.mutate import damaged, dumped, edited, odd

CHUNKS = 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=2)


def door() -> Door:
    return Session()


class Session:
    memory_mib = 128
    case_s = 20.0

    def open(self, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        self._llm = LLM("tiny", kv_cache_tokens=32 * CHUNK, sessions_dir=str(folder))
        self._tokens = [10 + i % 1000 for i in range(CHUNKS * CHUNK + 5)]
        self._right = self._llm.generate([self._tokens], PARAMS)[0].token_ids
        self._llm.save_session("a", self._tokens)
        self._path = sessions_of(self._llm.engine).folder.path("", "a")
        self._sound = self._path.read_bytes()

    def case(self, rng: Random) -> str:
        cache = self._llm.engine.cache
        cache.tree.clear()
        self._put(rng)
        try:
            answer = CallHandlers(self._llm.engine).ask(LoadSession("a", ""))
        except InvalidRequest:
            answer = None
        cache.check()
        assert not cache.tables and not cache.loose, "a refused file holds chunks"
        assert self._llm.generate([self._tokens], PARAMS)[0].token_ids == self._right, "wrong bits passed the checks"
        return "refused" if answer is None else "loaded"

    def _put(self, rng: Random) -> None:
        """Something in place of the sound file."""
        if self._path.is_dir():
            self._path.rmdir()
        self._path.unlink(missing_ok=True)
        kind = rng.randrange(8)
        if kind == 0:
            rng.choice((os.mkfifo, Path.mkdir, lambda at: at.symlink_to("/dev/zero")))(self._path)
        elif kind <= 3:
            end = 8 + int.from_bytes(self._sound[:8], "little")
            header = json.loads(self._sound[8:end])
            told = dumped(edited(header, rng) if kind < 3 else odd(rng)).encode("utf-8", "replace")
            self._path.write_bytes(len(told).to_bytes(8, "little") + told + self._sound[end:])
        else:
            self._path.write_bytes(damaged(self._sound, rng))

    def close(self) -> None:
        self._llm.close()
