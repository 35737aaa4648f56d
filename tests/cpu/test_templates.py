"""Chat templates in their own processes: what transformers would write, and an end to whatever does not end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.engine import template_worker as worker
from headrace.engine.templates import Renderer
from headrace.engine.tokenizer import Tokenizer
from headrace.types import InvalidRequest
from tests.support.fake_server import until
from tests.support.server_process import process
from tests.support.small_tokenizers import TEMPLATE, byte_level, save

pytestmark = pytest.mark.cpu

USER = [{"role": "user", "content": "x"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Processes of renderers that tests of other files left to the collector."""
    return children()


@pytest.fixture(scope="module")
def renderer(others: set[int]) -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


def render(renderer: Renderer, template: str, messages: Any = USER, **variables: Any) -> str:
    return renderer.render(template, messages, None, True, variables)


def children() -> set[int]:
    found = psutil.Process().children()
    return {p.pid for p in found if p.status() != psutil.STATUS_ZOMBIE and worker.__name__ in p.cmdline()}


DOUBLING = "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}"


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        pytest.param(ENDLESS, "processor time", marks=pytest.mark.matrix),
        pytest.param("{{ 10 ** (10 ** 9) }}", "processor time|memory", marks=pytest.mark.matrix),
        (DOUBLING, "memory"),
        ("{{ 'x' * 10 ** 12 }}", "memory"),
        ("{{ 'x' * 34 * 1024 * 1024 }}", "MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ raise_exception('x' * 10 ** 7) }}", "refused"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "refused"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "refused|ended"),
    ],
    ids=[
        "endless",
        "power",
        "doubling",
        "product",
        "output",
        "recursion",
        "reason",
        "sandbox",
        "syntax",
        "parentheses",
    ],
)
def test_past_a_limit_the_request_is_refused_and_the_next_one_answered(
    template: str, limit: str, renderer: Renderer, others: set[int]
) -> None:
    with pytest.raises(InvalidRequest, match=limit) as refused:
        render(renderer, template)
    assert refused.value.param == "messages" and len(str(refused.value)) < 2000
    assert render(renderer, "{{ messages[0].content }}!") == "x!"
    assert len(children() - others) <= 2


def test_two_render_at_once_and_one_that_does_not_end_holds_up_nobody(renderer: Renderer) -> None:
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(render, renderer, ENDLESS)
        for _ in range(5):
            assert render(renderer, "{{ messages[0].content }}") == "x"
        assert not endless.done()
        with pytest.raises(InvalidRequest, match="processor time"):
            endless.result()


def test_a_process_that_somebody_ended_is_replaced() -> None:
    with_one = Renderer()
    before = children()
    with_one.warm()
    until(lambda: bool(children() - before), 20)  # a process that has just begun has no command line yet
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    assert render(with_one, "fine") == "fine"
    assert children() - before - {pid}
    with_one.close()
    until(lambda: children() <= before, 20)


def test_closing_ends_a_rendering_under_way() -> None:
    ending = Renderer()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(render, ending, ENDLESS)
        until(lambda: bool(ending._processes._busy), 20)
        started = time.monotonic()
        ending.close()
        with pytest.raises(InvalidRequest):
            result.result(20)
        assert time.monotonic() - started < worker.CPU_S
    with pytest.raises(InvalidRequest, match="ending"):
        render(ending, "x")


def test_a_template_sees_nothing_of_the_server(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    fresh = Renderer()
    try:
        assert render(fresh, "ok") == "ok"
        (child,) = (one for one in fresh._processes._idle)
        seen = Path(f"/proc/{child.pid}/environ").read_bytes()
        assert b"secret" not in seen and b"HOME" not in seen
        limits = Path(f"/proc/{child.pid}/limits").read_text()
        assert f"Max data size             {worker.MEMORY_BYTES}" in limits
        assert "Max file size             0 " in limits
        assert os.readlink(f"/proc/{child.pid}/cwd") == "/"
    finally:
        fresh.close()


def test_variables_that_are_no_json(renderer: Renderer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), {1, 2}, deep):
        with pytest.raises(InvalidRequest, match="JSON"):
            render(renderer, "x", value=value)
    for odd in (float("nan"), 10**4000, "\ud800", {"a": [None]}):
        assert render(renderer, "{{ value }}", value=odd) == str(odd)


CONVERSATIONS: list[tuple[Any, dict[str, Any]]] = [
    (USER, {}),
    ([{"role": "user", "content": "é🦊\u2028"}, {"role": "assistant", "content": "y", "name": None}], {}),
    (USER, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": [None, True]}}}]}),
    (USER, {"shout": True, "bos_token": "B", "documents": [{"title": "t", "text": "u"}]}),
    ([*USER, {"role": "assistant", "content": "y "}], {"continue_final_message": True, "add_generation_prompt": False}),
]


@pytest.fixture(
    scope="module",
    params=[TEMPLATE, {"default": TEMPLATE, "tool_use": "T{{ tools | tojson }}{{ messages }}"}],
    ids=["one template", "one for tools too"],
)
def spoken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """Its template's process serves all conversations."""
    tokenizer = Tokenizer(save(byte_level(), tmp_path_factory.mktemp("spoken"), request.param))
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize(
    "number", range(len(CONVERSATIONS)), ids=["plain", "odd text", "tools", "variables", "continued"]
)
def test_the_text_is_that_of_transformers(number: int, spoken: Tokenizer) -> None:
    messages, more = CONVERSATIONS[number]
    expected = spoken._hf.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **more})
    assert spoken.render_chat(messages, **more) == expected
    assert spoken.apply_chat(messages, **more) == spoken.encode(expected, add_special_tokens=False)


@pytest.mark.matrix
def test_the_server_answers_others_and_ends_while_a_template_does_not(tmp_path: Path) -> None:
    import shutil

    from headrace.assets import __file__ as assets

    model = tmp_path / "model"
    shutil.copytree(Path(assets).parent / "tiny", model)
    own = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{% if messages[0].content == 'hang' %}" + ENDLESS + "{% endif %}" + own)
    with process(tmp_path, model=str(model)) as server:
        server.wait_ready()
        name = server.client().models.list().data[0].id

        def ask(content: str) -> int:
            body = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
            return server.http.post("/v1/chat/completions", json=body).status_code

        with ThreadPoolExecutor(2) as pool:
            hanging = pool.submit(ask, "hang")
            completion = {"model": name, "prompt": "In the", "max_tokens": 2}
            assert server.http.post("/v1/completions", json=completion).status_code == 200
            assert ask("hello") == 200
            assert not hanging.done()
            assert hanging.result() == 400
            threading.Thread(target=ask_quietly, args=(server.url, name)).start()
            until(lambda: len(server.template_processes()) >= 1, 20)
            time.sleep(0.2)
        started = time.monotonic()
        assert server.stop() == 0, server.log.read_text()
        assert time.monotonic() - started < 15


def ask_quietly(url: str, name: str) -> None:
    import contextlib

    import httpx

    body = {"model": name, "messages": [{"role": "user", "content": "hang"}], "max_tokens": 2}
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url + "/v1/chat/completions", content=json.dumps(body), timeout=30)
