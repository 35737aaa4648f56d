"""models.json, the remembered digests of weight files: whatever stands there, the identity is the right one."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from random import Random

from headrace.offload import identity
from tools.fuzz.doors import Door
from tools.fuzz.mutate import damaged, dumped, edited, nested, odd


def door() -> Door:
    return Memo()


class Memo:
    memory_mib = 96
    case_s = 20.0

    def open(self, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        self._model, self._cache = folder / "model", folder / "cache"
        self._model.mkdir()
        self._cache.mkdir()
        (self._model / "config.json").write_text("{}")
        (self._model / "model.safetensors").write_bytes(Random(1).randbytes(10_000))
        time.sleep(identity.SETTLED_NS / 1e9 + 0.1)
        self._right = identity.model_identity(self._model, self._cache)
        self._sound = (self._cache / identity.MEMO).read_bytes()

    def case(self, rng: Random) -> str:
        path = self._cache / identity.MEMO
        path.unlink(missing_ok=True)
        kind = rng.randrange(6)
        if kind == 0:
            rng.choice((os.mkfifo, Path.mkdir, lambda at: at.symlink_to("/dev/zero")))(path)
        elif kind == 1:
            path.write_text(rng.choice((dumped(odd(rng)), dumped(nested(500)), "{" * 100_000)))
        elif kind <= 3:
            path.write_text(dumped(edited(json.loads(self._sound), rng)))
        else:
            path.write_bytes(damaged(self._sound, rng))
        assert identity.model_identity(self._model, self._cache) == self._right
        if path.is_dir():
            path.rmdir()
            return "a folder"
        return "right"

    def close(self) -> None:
        pass
