"""Restores over PCIe, and KVPR's table on its shapes, which tools/gpu/kvpr.py measures."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tools.gpu.runner import Case, Goal, LeftOut, Row

SECONDS = 30.0
GOALS = (Goal("less", 0.3), Goal("over_best", 0.03, most=True), Goal("prediction_off", 0.1, most=True))
"""Less time than by loading everything; of the solver's split over the best of a sweep; of what it predicts."""


def cases() -> Iterator[Case]:
    yield Case("KVPR's table", table)


def table() -> list[Row]:
    """A row for each shape. Raises LeftOut without the module."""
    if find_spec("tools.gpu.kvpr") is None:
        raise LeftOut("tools/gpu/kvpr.py is missing")
    from tools.gpu import kvpr

    rows = []
    for found in kvpr.table(SECONDS)["rows"]:
        figures = {name: value for name, value in found.items() if name != "shape"}
        rows.append(Row(found["shape"], figures | {"prediction_off": abs(found["prediction"])}, GOALS))
    return rows
