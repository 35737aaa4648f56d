"""What reports of several benchmarks share: matplotlib."""

from __future__ import annotations

from typing import Any


def plotter() -> Any:
    """matplotlib's pyplot without a display. Raises ValueError with the remedy."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
