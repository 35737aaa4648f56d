"""The engine's process group ends as a whole; pings are answered while the computing thread is busy."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace import AsyncLLM, SamplingParams
from headrace.engine import messages as m
from headrace.engine import process
from headrace.engine.calls import Refused
from headrace.engine.worker import Inbox, Link
from headrace.stats import EngineStats, SchedulerStats
from headrace.types import Delta
from tests.support.fake_server import until

TINY = Path(process.__file__).parents[1] / "assets" / "tiny"

PARENT = """
import os, signal, subprocess, sys
link = os.fdopen(int(sys.argv[1]), "r+b", 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the system sends to stopped processes of a group without parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.kill(child.pid, signal.SIGSTOP)
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
link.write(b"%10d" % child.pid)
while link.read(1) or sys.argv[2] == "deaf":
    pass
"""


def started(behaviour: str) -> tuple[process.Process, socket.socket, int]:
    """(process, our end of its socket, id of its stopped child)."""
    ours, theirs = socket.socketpair()
    with theirs:
        number = str(theirs.fileno())
        made = process.start([sys.executable, "-c", PARENT, number, behaviour], theirs.fileno())
    return made, ours, int(ours.recv(10, socket.MSG_WAITALL))


def gone(pid: int) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_what_is_left_of_the_group_ends_with_its_first_process() -> None:
    made, ours, child = started("obedient")
    assert not gone(child)
    ours.close()
    process.end(made)
    assert made.returncode == 0
    until_gone(child)
    process.end(made)
    process.kill(made)


def test_an_engine_that_nobody_takes_ends() -> None:
    """While it imports; one that was taken is left to whoever took it, and ends with the link."""
    unused, used = process.EngineStart(), process.EngineStart()
    made, link = used.take()
    for each in (unused, used):
        each.close()
    assert unused.process.returncode == 0 and made.poll() is None
    link.close()
    process.end(made)
    assert made.returncode == 0


def test_kill_ends_stopped_processes_of_the_group() -> None:
    made, ours, child = started("obedient")
    process.kill(made)
    until_gone(child)
    assert made.wait(10) == -9
    ours.close()


def test_process_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "END_S", 0.2)
    made, ours, child = started("deaf")
    ours.close()
    process.end(made, 0.2)
    assert made.returncode == -9
    until_gone(child)


def test_others_are_left_alone() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    made, ours, _ = started("obedient")
    process.kill(made)
    process.end(made)
    ours.close()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_ping_is_answered_while_nobody_takes_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As during a long step: the inbox is not looked at. With the end of the stream the time to store begins."""
    monkeypatch.setattr(process, "STORE_S", 0.01)
    ours, theirs = socket.socketpair()
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    inbox = Inbox(Link(theirs), left.put)
    inbox.serving.set()
    ours.settimeout(20)
    for message in (m.Abort("a"), m.EnginePing(), m.Abort("b"), m.EnginePing()):
        ours.sendall(m.frame(message))
    pong = m.frame(m.EnginePong())
    with ours.makefile("rb") as stream:
        assert stream.read(2 * len(pong)) == pong * 2
    ours.close()
    assert [inbox.get(20) for _ in range(3)] == [m.Abort("a"), m.Abort("b"), None]
    assert left.get(timeout=20) == 1
    theirs.close()


def test_frames_of_two_threads_do_not_mix() -> None:
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    large = m.EngineFailed("x" * 1_000_000)
    threads = [
        threading.Thread(target=lambda: [link.send(large) for _ in range(5)]),
        threading.Thread(target=lambda: [link.send(m.EnginePong()) for _ in range(500)]),
    ]
    for thread in threads:
        thread.start()
    received = []
    with ours.makefile("rb") as stream:
        for _ in range(505):
            received.append(m.from_engine(stream.read(m.length(stream.read(m.LENGTH.size)))))
    assert received.count(large) == 5 and received.count(m.EnginePong()) == 500
    for thread in threads:
        thread.join()


def test_counters_that_cannot_be_packed_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The server gets the deltas, and is told nothing of the counters."""
    ours, theirs = socket.socketpair()
    link, stats = Link(theirs), EngineStats(SchedulerStats(running=2**64))
    for _ in range(3):
        link.send_events(
            m.Events([Delta("r", 0, "text")], ["s"], {"t": Refused("why", "prompt", "kv_pool_exceeded")}, stats)
        )
    with ours, ours.makefile("rb") as stream:
        for _ in range(3):
            told = m.from_engine(stream.read(m.length(stream.read(m.LENGTH.size))))
            assert told == m.Events(
                [Delta("r", 0, "text")], ["s"], {"t": Refused("why", "prompt", "kv_pool_exceeded")}, EngineStats()
            )
    assert caplog.text.count("cannot be told") == 1
    theirs.close()


SERVER = """
import socket, subprocess, sys
from headrace.config import EngineConfig
from headrace.engine import messages as m
from headrace.engine import process

ours, theirs = socket.socketpair()
engine = process.start([sys.executable, "-c", sys.argv[2], str(theirs.fileno()), sys.argv[1]], theirs.fileno())
theirs.close()
ours.sendall(m.frame(m.LoadModel(EngineConfig(model=sys.argv[1]).flat)))
print(engine.pid, flush=True)
engine.wait()
"""
ENGINE = """
import sys
from pathlib import Path
from headrace.engine import loader, worker

folder = Path(sys.argv[2])

def hang(*_):
    (folder / "reached").touch()
    (folder / "pipe").read_bytes()

loader.load = hang
worker.main(int(sys.argv[1]))
"""


def test_an_engine_that_hangs_while_loading_ends_with_its_server(tmp_path: Path) -> None:
    """The server is killed, so it cannot end its engine any more, which waits for a pipe for ever."""
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-c", SERVER, str(tmp_path), ENGINE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        until(lambda: (tmp_path / "reached").exists(), 100)
        assert not gone(engine)
        server.kill()
    until_gone(engine)


async def test_files_of_the_working_directory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine's process and its ranks, whose modules they would hide: the folder may be a stranger's model."""
    for name in ("logging", "queue", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    async with AsyncLLM("tiny", kv_cache_tokens=4096, context_parallel_size=2, threads=1) as llm:
        assert [delta.text async for delta in llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=4))]
    assert not (tmp_path / "ran").exists()
