"""The Vercel AI SDK in node: its OpenAI-compatible, OpenAI (responses and chat) and Anthropic providers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tools.clients.servers import ROOT, Server

SCRIPT = ROOT / "tools/clients/node/ai_sdk.mjs"
MODULES = ROOT / "build/clients-node"
PROVIDERS = ["compatible", "openai responses", "openai chat", "anthropic"]
EACH = re.findall(r"tests\[`\$\{name\}: ([^`]+)`\]", SCRIPT.read_text())
NAMES = [f"{provider}: {what}" for provider in PROVIDERS for what in EACH] + ["compatible: embedMany"]


@pytest.fixture(scope="module")
def told(real: Server, scripted: Server) -> dict[str, str | None]:
    """Test -> its error, of one run of node."""
    if shutil.which("node") is None or not (MODULES / "node_modules/ai").is_dir():
        pytest.skip("node, or its packages (tools/clients/install.py), are not there")
    shutil.copy(SCRIPT, MODULES)  # modules are looked for beside the script
    done = subprocess.run(
        ["node", SCRIPT.name, real.url, scripted.url], cwd=MODULES, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {told["name"]: told["error"] for told in lines}


@pytest.mark.parametrize("name", NAMES)
def test_ai_sdk(told: dict[str, str | None], name: str) -> None:
    assert told[name] is None, told[name]
