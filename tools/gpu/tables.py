"""A result of `make gpu-check` as Markdown: a table for each section, with its goals, for docs/gpu.md.

python -m tools.gpu.tables build/gpu-check.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.runner import shown

HEAD = ("section", "case", "status", "seconds", "name", "goals")
"""What a case has beside its figures."""


def markdown(result: dict[str, Any]) -> str:
    """The card, then the sections in their order; cases without figures are named at the end."""
    machine = result["machine"]
    lines = [f"{result['date'][:10]}, {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}:"]
    sections: dict[str, list[dict[str, Any]]] = {}
    for case in result["cases"]:
        sections.setdefault(case["section"], []).append(case)
    for name, cases in sections.items():
        lines += ["", f"**{name}**", "", *table([case for case in cases if "name" in case])]
        lines += [f"{case['case']}: {case['status']}." for case in cases if case["status"] != "measured"]
    return "\n".join(lines) + "\n"


def table(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows of the cases; a column for each figure that one of them has, dicts left out."""
    columns: list[str] = []
    for case in cases:
        columns += [key for key, value in case.items() if key not in (*HEAD, *columns) and type(value) is not dict]
    if not columns:
        return
    yield f"| | {' | '.join(column.replace('_', ' ') for column in columns)} | goals |"
    yield "|---" + "|---:" * len(columns) + "|---|"
    for case in cases:
        cells = [shown(case[column]) if column in case else "" for column in columns]
        yield f"| {case['name']} | {' | '.join(cells)} | {'; '.join(case.get('goals', ()))} |"


if __name__ == "__main__":
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text())))
