"""What the driver of `headrace bench engine` and the process of each engine say to each other. Standard library only:
the peers' processes import this from environments of their own.

A process is started with a checkpoint folder and options (JSON). It answers {"ready": true} or {"error": reason}, then
takes one line per run, {"prompts": [[token id]], "max_tokens": [n]}, and answers {"times": [[seconds]]}: when each
token of each answer arrived, counted from the moment the run was taken up. All requests of a run arrive at once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

Times = list[list[float]]


class Engine(Protocol):
    """An engine under test, greedy, never ending an answer early."""

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Times: ...


def serve(load: Callable[[Path, dict[str, Any]], Engine]) -> None:
    """The main function of an engine's process: load(checkpoint, options), then runs until standard input ends."""
    answers = _own_stdout()
    try:
        engine = load(Path(sys.argv[1]), json.loads(sys.argv[2]))
        engine.run([[5, 6, 7, 8] * 16], [4])
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _say(answers, {"ready": True})
    for line in sys.stdin:
        try:
            _say(answers, {"times": engine.run(**json.loads(line))})
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
            return


def _own_stdout() -> TextIO:
    """Standard output for answers alone: whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def figures(times: Times, prime_s: float, overall: bool) -> dict[str, float | None]:
    """What a run comes to. Times to the first token are the median over its requests.

    decode_tok_s counts the tokens that arrive after every request has its first one; overall: all tokens over the
    whole time, for requests that come and go. wall_s includes priming.
    """
    began = max(row[0] for row in times)
    end = max(row[-1] for row in times)
    later = sum(1 for row in times for moment in row if moment > began)
    rate = sum(map(len, times)) / end if overall else later / (end - began) if later else None
    return {
        "ttft_s": statistics.median(row[0] for row in times),
        "decode_tok_s": rate,
        "wall_s": prime_s + end,
    }
