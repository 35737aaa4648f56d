"""Shapes that clients send are compiled in a process of its own first: what takes for ever, or ends it, ends there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import Structured
from headrace.engine.capacity import model_folder
from headrace.engine.structured import shape_worker as worker
from headrace.engine.structured.door import ShapeDoor
from headrace.engine.tokenizer import Tokenizer
from headrace.types import InvalidRequest, SamplingParams

pytestmark = pytest.mark.cpu
ENDS = {"const": -1e19, "type": "integer"}
"""Ends the library's process, if nobody looks at numbers before."""


class Sizes:
    """What a door asks of a capacity."""

    vocab_size, eos_token_ids = 4096, (0,)


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer(model_folder("tiny"))
    yield made
    made.close()


@pytest.fixture
def door() -> Iterator[ShapeDoor]:
    made = ShapeDoor()
    yield made
    made.close()


def sizes(tokenizer: Tokenizer) -> Any:
    found = Sizes()
    found.vocab_size = tokenizer.vocab_size
    return found


def looked_at(door: ShapeDoor, tokenizer: Tokenizer, **shape: Any) -> None:
    params = SamplingParams(structured=Structured(**shape))
    asyncio.run(door.check_beside(params, tokenizer, sizes(tokenizer)))


def refusal(door: ShapeDoor, tokenizer: Tokenizer, **shape: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        looked_at(door, tokenizer, **shape)
    assert refused.value.param == "structured"
    return str(refused.value)


def children() -> set[int]:
    found = psutil.Process().children()
    return {p.pid for p in found if p.status() != psutil.STATUS_ZOMBIE and worker.__name__ in p.cmdline()}


@pytest.mark.parametrize(
    "shape",
    [
        dict(json={"type": "object", "properties": {"a": {"type": "integer"}}}), dict(json_object=True),
        dict(regex="[0-9]{2}"), dict(choice=["yes", "no"]), dict(grammar='start: "a" | "b"'),
    ],
    ids=lambda shape: next(iter(shape)),
)  # fmt: skip
def test_good_ones_pass(shape: dict[str, Any], door: ShapeDoor, tokenizer: Tokenizer) -> None:
    looked_at(door, tokenizer, **shape)
    looked_at(door, tokenizer, **shape)


@pytest.mark.parametrize(
    "shape",
    [
        dict(json={"items": {"uniqueItems": True}}), dict(json={"type": "string", "minLength": 3, "maxLength": 2}),
        dict(regex="(?=a)b"), dict(regex="[z-a]"), dict(grammar="start: nothing"), dict(choice=["\x00"]),
        dict(json={"type": "string", "pattern": "^a$", "minLength": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_others_are_refused_in_the_same_words(shape: dict[str, Any], door: ShapeDoor, tokenizer: Tokenizer) -> None:
    told = refusal(door, tokenizer, **shape)
    with pytest.raises(InvalidRequest) as here:
        ShapeDoor().check(SamplingParams(structured=Structured(**shape)), tokenizer, sizes(tokenizer))
    assert told == str(here.value)


def break_child(monkeypatch: pytest.MonkeyPatch, folder: Path, how: str) -> None:
    """Of processes that begin from here on."""
    (folder / "sitecustomize.py").write_text(f"from headrace.engine.structured import compile, numbers, plain\n{how}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("compile.check = lambda *_: 1 / 0", "the library for grammars failed on this shape"),
        ("import os; compile.check = lambda *_: os._exit(1)", "regex: compiling it took more than 1024 MiB of memory"),
    ],
)
def test_what_fails_there_is_refused(
    how: str, told: str, door: ShapeDoor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_child(monkeypatch, tmp_path, how)
    assert refusal(door, tokenizer, regex="a").startswith(told)


def test_one_that_ends_before_it_has_begun_is_begun_again(
    door: ShapeDoor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one that somebody ends."""
    mark = tmp_path / "begun"
    how = f"""
import os, headrace.engine.structured.by_bytes as module
made = module.by_bytes
def once(*given):
    if not os.path.exists({str(mark)!r}):
        open({str(mark)!r}, "w").close()
        os.kill(os.getpid(), 9)
    return made(*given)
module.by_bytes = once"""
    break_child(monkeypatch, tmp_path, how)
    looked_at(door, tokenizer, regex="a")
    assert mark.exists()


def test_what_ends_the_process_is_refused(
    door: ShapeDoor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its own process: this one, and the next shape, go on."""
    break_child(monkeypatch, tmp_path, "plain.exact = lambda value: True")
    assert refusal(door, tokenizer, json=ENDS).startswith("json: compiling it ended the process that computes it")
    looked_at(door, tokenizer, json={"type": "integer"})


@pytest.mark.matrix
def test_what_takes_for_ever_is_refused(
    door: ShapeDoor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_child(monkeypatch, tmp_path, "numbers.MAX_COMMON = 1 << 40")
    shape = {"allOf": [{"type": "integer", "multipleOf": 9999}, {"multipleOf": 9998}]}
    assert "of processor time; use a smaller" in refusal(door, tokenizer, json=shape)
    looked_at(door, tokenizer, json={"type": "integer"})


def test_a_process_that_somebody_ended_is_replaced(door: ShapeDoor, tokenizer: Tokenizer) -> None:
    before = children()
    looked_at(door, tokenizer, regex="a")
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    looked_at(door, tokenizer, regex="b")
    limits = Path(f"/proc/{next(iter(children() - before))}/limits").read_text()
    assert f"Max data size             {worker.MEMORY_BYTES}" in limits and "Max file size             0 " in limits


def test_closing_ends_it(door: ShapeDoor, tokenizer: Tokenizer) -> None:
    before = children()
    looked_at(door, tokenizer, regex="a")
    door.close()
    assert children() <= before
    assert refusal(door, tokenizer, regex="b") == "the server is ending"
    looked_at(door, tokenizer, regex="a")  # known


def test_a_model_without_a_tokenizer(door: ShapeDoor) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        asyncio.run(door.check_beside(SamplingParams(structured=Structured(regex="a")), None, Sizes()))
