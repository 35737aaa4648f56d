"""What the processes of a server import, each for itself: what they do not need would be paid at every start."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu

FRONT = """
import headrace.cli.main, headrace.server.serve
from headrace.engine.capacity import model_folder
from headrace.engine.tokenizer import Tokenizer
assert Tokenizer(model_folder("tiny")).encode("hello")
"""
TEMPLATES = """
import json
from transformers.utils.chat_template_utils import render_jinja_template
from headrace.engine import template_worker
request = dict(messages=[dict(role="user", content="hello")], chat_template="{{ messages[0].content | tojson }}")
assert template_worker._render(render_jinja_template, json.dumps(request).encode())[1] == b'"hello"'
"""
ENGINE = """
import headrace.engine.worker
from headrace.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.loader import load
from headrace.types import Request, SamplingParams
core = EngineCore(load(EngineConfig(model="tiny", kv_cache_tokens=1024)))
core.add(Request("a", [5, 6, 7], SamplingParams(max_tokens=2)))
while core.has_work:
    core.step()
"""
RANK = """
import headrace.parallel.worker
from headrace.config import EngineConfig
from headrace.engine import ranks
ranks.load_share(EngineConfig(model="tiny"), None)
"""

MODELS = {"transformers.activations", "transformers.models", "transformers.modeling_utils"}
COMPILERS = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton"}


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        pytest.param(FRONT, {"torch"} | MODELS, id="front"),
        pytest.param(TEMPLATES, {"torch"} | MODELS, id="templates"),
        pytest.param(ENGINE, MODELS | COMPILERS, id="engine"),
        pytest.param(RANK, MODELS | COMPILERS | {"tokenizers", "transformers"}, id="rank"),
    ],
)
def test_a_process_imports_what_it_needs(program: str, unneeded: set[str]) -> None:
    tell = "\nimport sys; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program + tell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not unneeded & set(done.stdout.splitlines())
