"""The attention backends by name. Another one is a module of its own and a line of BACKENDS. Imports nothing: settings
read the names before torch is loaded.
"""

from __future__ import annotations

from typing import NamedTuple


class BackendEntry(NamedTuple):
    """module: imported when the backend is first asked for. told: a word on it for the help text."""

    module: str
    told: str


BACKENDS = {
    "triton": BackendEntry("headrace.kernels.triton.backend", "everything on a CUDA device"),
    "cpu": BackendEntry("headrace.kernels.cpu", "C++"),
    "reference": BackendEntry("headrace.kernels.reference", "slow truth"),
}
"""'auto' takes the first that can be used and declares itself automatic; the last always can."""
