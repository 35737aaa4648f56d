"""The blocks of docs/clients.md run as they stand, but for the port. Variables that a section exports are those of its
other blocks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools.clients.servers import ROOT, Server

URL = "http://127.0.0.1:8000"
PAGE = (ROOT / "docs/clients.md").read_text()
BLOCK = re.compile(r"<!-- tested by \S+ -->\n```(\w+)\n(.*?)```", re.DOTALL)


@dataclass
class Snippet:
    section: str
    language: str
    text: str
    variables: dict[str, str] = field(default_factory=dict)


def snippets() -> list[Snippet]:
    found = []
    for part in PAGE.split("\n## ")[1:]:
        variables: dict[str, str] = {}
        for language, text in BLOCK.findall(part):
            exported = dict(re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE))
            variables.update(exported)
            if not exported:
                found.append(Snippet(part.split("\n")[0], language, text, variables))
    return found


def command(snippet: Snippet, text: str, folder: Path) -> list[str]:
    if snippet.language == "bash":
        return ["bash", "-euc", text]
    if snippet.language == "python":
        newest = ROOT / ".venv-clients-newest/bin/python"  # for what needs newer clients than other frameworks take
        return [str(newest) if "from agents import" in text else sys.executable, "-c", text]
    modules = ROOT / "build/clients-node"
    if shutil.which("node") is None or not (modules / "node_modules").is_dir():
        pytest.skip("node, or its packages (tools/clients/install.py), are not there")
    script = modules / "snippet.mjs"
    script.write_text(text)
    return ["node", str(script)]


@pytest.mark.parametrize("snippet", snippets(), ids=lambda snippet: f"{snippet.section}-{snippet.language}")
def test_snippet(snippet: Snippet, real: Server, scripted: Server, tmp_path: Path) -> None:
    server = scripted if "get_weather" in snippet.text else real  # the shipped model calls no tool by itself
    assert URL in snippet.text + "".join(snippet.variables.values())
    told = {name: value.replace(URL, server.url) for name, value in snippet.variables.items()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**{k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}, **told, "PATH": path}
    words = command(snippet, snippet.text.replace(URL, server.url), tmp_path)
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() and "error" not in done.stdout, done.stdout


def test_all_are_found() -> None:
    assert len(snippets()) >= 11
    assert PAGE.count("test_docs_clients.py -->") == len(BLOCK.findall(PAGE))
