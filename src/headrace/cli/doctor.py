"""`headrace doctor`: prints the findings of headrace.doctor."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from headrace.console import out, working
from headrace.doctor import machine


def run(model: str | None, as_json: bool) -> None:
    """Prints the findings. Raises ValueError where the model cannot be served here."""
    with working("measuring the machine"):
        found = machine.findings()
        if model:
            found["model"] = machine.check_model(model)
    if as_json:
        print(json.dumps(found, indent=1, default=str))
        return
    for title, rows in found.items():
        _show(title, rows)


def _show(title: str, rows: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, f"{value:,.1f}" if isinstance(value, float) else str(value))
    out.print(table)
