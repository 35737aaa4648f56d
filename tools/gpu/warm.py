"""Compiles what engines launch, a process for each model, before anything is timed: kernels lie in Triton's cache then.

    python -m tools.gpu.warm S1 8B 7B

A model of one layer has the kernels of the whole one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from tools.gpu import sessions, timing
from tools.gpu.models import MODELS, drawn_model
from tools.gpu.runner import LeftOut, Row

LENGTHS = (8192, 700, 130)
"""Of prompts: whole steps, and ends that are multiples of 2 alone."""


def compile_kernels(name: str) -> None:
    """Prompts and steps of decoding of one model, greedy and drawn."""
    shape = replace(MODELS[name], layers=1)
    with drawn_model(shape, timing.CUDA).engine() as llm:
        for length in LENGTHS:
            sessions.run(llm, [sessions.drawn_tokens(length, shape.vocab)], sessions.answers(2))
        for sampled in (False, True):
            for count in (1, 16):
                prompts = [sessions.drawn_tokens(64 + number, shape.vocab) for number in range(count)]
                sessions.run(llm, prompts, sessions.answers(4, sampled))


class Warming:
    """Processes that compile, from now on."""

    def __init__(self, names: Sequence[str]) -> None:
        self.processes = {name: subprocess.Popen([sys.executable, "-m", "tools.gpu.warm", name]) for name in names}

    def result(self, seconds: float) -> Row:
        """Waits for them. Raises LeftOut where they take longer, RuntimeError naming those that failed."""
        ends, began = time.monotonic() + seconds, time.monotonic()
        try:
            status = {name: each.wait(max(0.1, ends - time.monotonic())) for name, each in self.processes.items()}
        except subprocess.TimeoutExpired:
            self.stop()
            raise LeftOut(f"not at their end after {seconds:.0f} s more") from None
        if failed := [name for name, code in status.items() if code]:
            raise RuntimeError(f"no kernels for {', '.join(failed)}: see above")
        return Row("kernels compiled", {"models": len(status), "waited_s": time.monotonic() - began})

    def stop(self) -> None:
        """Ends those that run."""
        for each in self.processes.values():
            if each.poll() is None:
                each.kill()


def main(names: Sequence[str]) -> int:
    """The exit status: 1 where a model's kernels do not compile."""
    if len(names) == 1:
        compile_kernels(names[0])
        return 0
    warming = Warming(names or list(MODELS))
    try:
        print(warming.result(600.0).told())
    finally:
        warming.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
