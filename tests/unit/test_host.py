"""Memory of this host within the limits of its control groups; standard streams that are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace import cgroups, host

pytestmark = pytest.mark.unit


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, on a machine with 8,000 bytes free."""
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host, "_memory", lambda _: 8000)
    return tmp_path


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_groups_the_machine_counts(groups: Path) -> None:
    assert (host.memory_available(), host.memory_limit()) == (8000, None)


def test_the_tightest_group_counts_and_the_file_cache_is_free(groups: Path) -> None:
    put(groups / "membership", "0::/pod/inner")
    put(groups / "pod/inner/memory.max", "max")
    put(groups / "pod/memory.max", 5000)
    put(groups / "pod/memory.current", 3000)
    put(groups / "pod/memory.stat", "anon 1900\ninactive_file 1000")
    assert (host.memory_available(), host.memory_limit()) == (3000, 5000)
    put(groups / "pod/memory.current", 9000)
    assert host.memory_available() == 0


def test_groups_of_the_first_version(groups: Path) -> None:
    put(groups / "membership", "4:memory:/docker\n3:cpu:/other")
    put(groups / "memory/docker/memory.limit_in_bytes", 4000)
    put(groups / "memory/docker/memory.usage_in_bytes", 3500)
    put(groups / "memory/docker/memory.stat", "inactive_file 1\ntotal_inactive_file 500")
    put(groups / "memory/memory.limit_in_bytes", 2**63 - 4096)
    assert (host.memory_available(), host.memory_limit()) == (1000, 4000)


STREAMS = """
import os, subprocess, sys
from headrace.host import open_streams
open_streams()
print("lost", sys.stdin.read())
print("lost", file=sys.stderr)
inner = subprocess.run([sys.executable, "-c", "import sys; print('lost'); assert None not in (sys.stdin, sys.stderr)"])
other = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(other, f"{other > 2} {inner.returncode}".encode())
"""


def test_closed_streams_are_the_null_device_here_and_in_children(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", STREAMS, str(told)]
    assert subprocess.run(command, check=False).returncode == 0
    assert told.read_text() == "True 0"
