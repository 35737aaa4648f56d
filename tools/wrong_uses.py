"""Runs every wrong use of tests/support/wrong_uses.py as a process and prints them as a Markdown table.

`python tools/wrong_uses.py [KIND...]` ends with 1 where one takes over a second, prints more than one line, or ends
with another code. Times are of a quiet machine, with the files of Python and of the package in memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.wrong_uses import WRONG_USES, WrongUse

MOST_S = 1.0
HEADRACE = Path(sys.executable).parent / "headrace"


def run(use: WrongUse) -> tuple[float, int, str]:
    """(Seconds, code, what stands on stderr.)"""
    with tempfile.TemporaryDirectory(prefix="wrong-") as folder:
        use.make_files(Path(folder))
        began = time.perf_counter()
        done = subprocess.run(
            [HEADRACE, *use.words], cwd=folder, env=os.environ | use.env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return time.perf_counter() - began, done.returncode, done.stderr.replace(folder, "")


def main(kinds: list[str]) -> int:
    """The number of uses that were not told as they should be."""
    print("| wrong use | command | code | s | line |\n| --- | --- | --: | --: | --- |")
    bad, slowest = [], 0.0
    for kind in kinds or WRONG_USES:
        for use in WRONG_USES[kind]:
            seconds, code, told = run(use)
            slowest = max(slowest, seconds)
            env = "".join(f"{name}={value} " for name, value in use.env.items())
            line = told.strip().replace("|", "\\|").replace("\n", "<br>")
            print(f"| {use.about} | `{env}headrace {use.args}` | {code} | {seconds:.2f} | {line} |", flush=True)
            one = len(told.splitlines()) == 1 and told.startswith("headrace: ") and use.told in told
            if not one or code != use.code or seconds > MOST_S:
                bad.append(f"{kind}: {use.about}")
    count = sum(len(WRONG_USES[kind]) for kind in kinds or WRONG_USES)
    print(f"\n{count} wrong uses, the slowest {slowest:.2f} s; not as they should be: {', '.join(bad) or 'none'}")
    return len(bad)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
