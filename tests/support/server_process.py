"""The server as a process of its own, and how tests ask it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from tests.support.fake_server import metric, until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void;"


class ServerProcess:
    """`headrace serve tiny` on a free port, its log in a file. `launcher`: arguments of Python that run it."""

    def __init__(self, folder: Path, *options: str, launcher: Sequence[str] = (), model: str = "tiny") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{self.port}.log"
        command = [sys.executable, *launcher, "-m", "headrace.cli.main", "serve", model, "--port", str(self.port)]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen([*command, *options], stdout=sink, stderr=subprocess.STDOUT)
        self.key = options[options.index("--api-key") + 1] if "--api-key" in options else "none"
        self.http = httpx.Client(base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {self.key}"})

    def health(self) -> int:
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self) -> None:
        until(lambda: self.health() == 200 or self.process.poll() is not None, 120, 0.05)  # it loads on the same cores
        assert self.process.poll() is None, self.log.read_text()

    def engine(self) -> psutil.Process:
        """Of which there is one."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        (engine,) = [p for p in found if "headrace.engine.worker" in p.cmdline()]
        return engine

    def template_processes(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children()
        return [p for p in found if "headrace.engine.template_worker" in p.cmdline()]

    def family(self) -> dict[str, psutil.Process]:
        """The engine's process as "0", its workers by rank."""
        engine = self.engine()
        commands = {p: p.cmdline() for p in engine.children()}
        worker = "headrace.parallel.worker"
        return {"0": engine} | {told[told.index(worker) + 1]: p for p, told in commands.items() if worker in told}

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key or self.key, max_retries=0, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.http.get("/metrics").text, name, **labels)

    def idle(self) -> bool:
        names = ("num_requests_running", "num_requests_waiting", "kv_chunks_used")
        return all(self.metric(name) == 0 for name in names)

    def stop(self) -> int:
        """Exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def process(folder: Path, *options: str, launcher: Sequence[str] = (), model: str = "tiny") -> Iterator[ServerProcess]:
    server = ServerProcess(
        folder, "--kv-cache-tokens", "131072", "--threads", "1", *options, launcher=launcher, model=model
    )
    try:
        yield server
    finally:
        server.http.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def text(prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
