"""Test functions a case of which took LEAST seconds or more: slow_tests.txt, a file and its functions in a line.

    python -m tests.support.slow_tests LOG

writes it anew from what `pytest -n 2 -p tests.support.scheduling --durations=0 --durations-min=0.01` printed.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

LEAST = 0.3
LIST = Path(__file__).with_name("slow_tests.txt")
DURATION = re.compile(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+tests/(\S.*)$", re.MULTILINE)


def slow_tests() -> frozenset[str]:
    """As `cpu/test_cli.py::test_demo_ends_well`."""
    lines = (line.split() for line in LIST.read_text().splitlines())
    return frozenset(f"{file}::{name}" for file, *names in lines for name in names)


def told(log: str) -> dict[str, list[str]]:
    """Files -> those functions, of what pytest printed. Setting a case up belongs to it."""
    seconds: dict[str, float] = defaultdict(float)
    for taken, case in DURATION.findall(log):
        seconds[case] += float(taken)
    slow = {case.split("[")[0] for case, taken in seconds.items() if taken >= LEAST}
    files: dict[str, list[str]] = defaultdict(list)
    for each in sorted(slow):
        file, name = each.split("::", 1)
        files[file].append(name)
    return files


if __name__ == "__main__":
    found = told(Path(sys.argv[1]).read_text())
    LIST.write_text("".join(f"{file} {' '.join(names)}\n" for file, names in sorted(found.items())))
    print(f"{sum(map(len, found.values()))} functions in {len(found)} files")
