"""Which of pytest's workers runs which test: `pytest -n 2 -p tests.scheduling` (pytest-xdist)."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):
    """Test by test to whoever is free, but a file of tests of processes to one worker: they share what was started for
    them, and ports, clusters and network namespaces that no two may have at once."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::")[0] if nodeid.startswith("tests/processes/") else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """In place of --dist load."""
    return Scheduling(config, log) if config.getvalue("dist") == "load" else None
