"""The two servers that clients are tried on, each a process of its own. Imports nothing of Headrace: the clients'
environment does not have it.

`real`: `headrace serve` on the shipped model (with a template that knows tools), for everything whose shape the server
enforces. `scripted`: the same server over a scripted engine, for loops in which a model chooses tools.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tools.clients.model import make_model

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/bin/python"
LOADING_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """A started server. `url` has no path; `base` is that of OpenAI's clients."""

    log: Path
    process: subprocess.Popen[bytes]
    port: int
    url: str = field(init=False)
    base: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self.base = self.url + "/v1"

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def wait(self) -> Server:
        end = time.monotonic() + LOADING_S
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.1)
        return self

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start(folder: Path, kind: str, *options: str, port: int | None = None) -> Server:
    """kind: 'real' or 'scripted'. The model and the log lie in `folder`. Does not wait."""
    model, port = folder / "model", port or free_port()
    if not model.exists():
        make_model(model)
    if kind == "real":
        command = ["-m", "headrace.cli.main", "serve", str(model), "--port", str(port), "--served-model-name", "tiny"]
        command += ["--kv-cache-tokens", "131072", "--threads", "1", "--kv-offload-path", "none", *options]
    else:
        command = ["-m", "tools.clients.scripted", str(model), str(port)]
    log = folder / f"{kind}-{port}.log"
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(PYTHON), *command], stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )
    return Server(log, process, port)
