"""`headrace batch` over the fake engine: rows, resumption, other files in the way, and engines that fail."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import batch
from headrace.config import EngineConfig
from headrace.console import ProgressLine
from headrace.server.batch import CHAT, TEXT
from headrace.types import EngineDead, UnsupportedModel
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import Maker, ask, text

pytestmark = pytest.mark.unit


def line(custom_id: str, body: dict[str, Any] | None = None, url: str = TEXT) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or text(custom_id)}) + "\n"


def healthy(number: int, engine: FakeEngine) -> None:
    pass


class Place:
    """A folder with a batch's two files."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"

    def run(self, *lines: str, quiet: bool = False, prepare: Any = healthy, **settings: Any) -> Maker:
        """Runs a batch of these lines, or of those of the last run."""
        if lines:
            self.source.write_text("".join(lines))
        makers: list[Maker] = []

        def engine_maker(config: EngineConfig) -> Maker:
            makers.append(Maker(config, prepare))
            return makers[0]

        config = EngineConfig(model="fake", **settings)
        batch.run(config, str(self.source), str(self.target), quiet=quiet, engine_maker=engine_maker)
        return makers[0]

    @property
    def rows(self) -> dict[str | None, dict[str, Any]]:
        rows = [json.loads(row) for row in self.target.read_text().splitlines()]
        found = {row["custom_id"]: row for row in rows}
        assert len(found) == len(rows), "one row for each"
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_rows_are_openais(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line("chat", ask("abcd"), CHAT),
        line("text", text("efgh")),
        line("refused", text("abcd", tempereture=1)),
        line("other model", text("abcd", model="gpt-9")),
        line("bad", url="/v1/embeddings"),
    ]
    place.run(*lines)
    rows = place.rows
    assert all(set(row) == {"id", "custom_id", "response", "error"} for row in rows.values())
    assert all(row["id"].startswith("batch_req_") for row in rows.values())
    told = {name: row["response"] and row["response"]["status_code"] for name, row in rows.items()}
    assert told == {"chat": 200, "text": 200, "refused": 400, "other model": 404, "bad": None}
    reply = rows["chat"]["response"]["body"]
    assert reply["object"] == "chat.completion" and reply["choices"][0]["message"]["content"] == "abcd\nabc"
    assert rows["text"]["response"]["body"]["choices"][0]["text"] == "efghefgh"
    assert rows["refused"]["response"]["body"]["error"]["param"] == "tempereture"
    assert rows["bad"]["error"]["code"] == "invalid_url" and rows["bad"]["error"]["line"] == 5
    assert len({row["response"]["request_id"] for row in rows.values() if row["response"]}) == 4
    said = capsys.readouterr().err
    assert (
        "answered 2 of 4 prompts in " in said
        and ": 9 prompt tokens (0 % cached, 9 computed), 16 tokens written" in said
    )
    assert "3 of 5 refused, the first is line 5: url is '/v1/embeddings'" in said


def test_quiet_says_only_what_was_refused(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.run(line("a"), line("b", text("")), quiet=True)
    assert capsys.readouterr().err == ("1 of 2 refused: line 2 (custom_id 'b'): prompt must not be empty\n")


def test_progress_tells_of_answers_and_speeds(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Line(ProgressLine):
        def __init__(self, tell: Any, share: Any) -> None:
            super().__init__(tell, share)
            shown.append((tell, share))

    monkeypatch.setattr(batch, "ProgressLine", Line)
    place.run(line("a"), line("b"), line("c", text("")))
    ((tell, share),) = shown
    assert re.fullmatch(r"3 of 3 prompts, input [\d,]+/s, output [\d,]+/s, 0 % cached", tell()) and share() == 1.0
    place.target.unlink()
    place.run(line("d"), quiet=True)
    assert len(shown) == 1, "quiet shows none"


def test_many_wait_without_429(place: Place) -> None:
    limits = {"max_queued_requests": 1, "max_queued_tokens": 1, "api_key": "of another server"}
    place.run(*(line(f"{i}", text(["ab", "cd", "ef"])) for i in range(100)), max_sequences=16, **limits)
    assert len(place.rows) == 100
    assert {row["response"]["status_code"] for row in place.rows.values()} == {200}


# ---- resumption ------------------------------------------------------------------------------------------------------


def test_what_is_answered_is_left_out(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(f"{i}") for i in range(5)]
    place.run(*lines[:3], "{}\n")
    before = place.target.read_bytes()
    place.source.write_text("".join([*lines[:3], "{}\n", *lines[3:]]))
    assert sum(engine.stats.tokens.prompt for engine in place.run().engines) == 2
    assert place.target.read_bytes().startswith(before) and len(place.rows) == 6
    said = capsys.readouterr().err
    assert "4 of 6 are in " in said and "answered 2 prompts in " in said
    assert place.run().engines == [], "nothing is left, so that no engine is needed"


def test_a_bad_line_of_another_file_has_a_row_of_its_own(place: Place) -> None:
    place.run(line("a"), '{"custom_id": "b"}\n', '{"custom_id": "b"}\n')
    assert len(place.target.read_text().splitlines()) == 3
    place.run('{"custom_id": "c"}\n', line("a"))
    rows = [json.loads(row) for row in place.target.read_text().splitlines()]
    assert [row["custom_id"] for row in rows].count("c") == 1 and len(rows) == 4
    place.run(line("a"), '{"custom_id": "c"}\n', '{"custom_id": "b"}\n')
    assert len(place.target.read_text().splitlines()) == 4, "the same lines in other places have their rows"


def test_a_full_disk_says_what_is_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.run(line("a"), "{}\n")
    opened = batch._opened

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __iter__(self) -> Any:
            return iter(self.file)

        def write(self, row: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def full(target: str) -> Iterator[Any]:
        with opened(target) as file:
            yield Full(file)

    monkeypatch.setattr(batch, "_opened", full)
    told = r"cannot write .*out.jsonl: No space left on device; 2 of 3 are in .*; the same command answers the others"
    with pytest.raises(OSError, match=told):
        place.run(line("a"), "{}\n", line("b"))


def test_torn_row_is_cut_off_and_answered_again(place: Place) -> None:
    lines = [line(f"{i}") for i in range(3)]
    place.run(*lines)
    whole = place.target.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in (1, len(last) - 1, len(last) - 30):
        place.target.write_bytes(whole[:-cut])
        assert place.run().engines[0].stats.finished.length == 1
        assert len(place.rows) == 3


def test_failures_of_the_server_are_asked_again(place: Place) -> None:
    place.run(line("a"))
    row = place.rows["a"]
    row["response"]["status_code"] = 500
    place.target.write_text(json.dumps(row) + "\n")
    place.run()
    rows = [json.loads(row) for row in place.target.read_text().splitlines()]
    assert [row["response"]["status_code"] for row in rows] == [500, 200]


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ("notes of mine", "line 1 is no row"),
        ("notes of mine\n", "line 1 is no row"),
        ('{"prompt": "a"}\n', "line 1 is no row"),
        (
            '{"id": "x", "custom_id": "a", "response": {"status_code": 200}, "error": null}\n',
            "line 1 answers a request",
        ),
        ('{"id": "x", "custom_id": "z", "response": {"status_code": 200}, "error": null}\n', "'z'"),
    ],
)
def test_other_files_stay_as_they_are(place: Place, held: str, words: str) -> None:
    place.target.write_text(held)
    with pytest.raises(ValueError, match=f"out.jsonl.*{words}.*name another file"):
        place.run(line("a"))
    assert place.target.read_text() == held


def test_same_name_for_another_request_is_not_its_answer(place: Place) -> None:
    place.run(line("a", text("this")))
    with pytest.raises(ValueError, match="answers a request that the input does not have"):
        place.run(line("a", text("that")))


def test_input_as_output_and_a_second_writer_are_refused(place: Place) -> None:
    place.run(line("a"))
    with place.target.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another batch is writing"):
            place.run()
    place.target = place.source
    with pytest.raises(ValueError, match="the input too"):
        place.run()


@pytest.mark.parametrize(("source", "target"), [("no/in.jsonl", "out.jsonl"), ("in.jsonl", "no/out.jsonl")])
def test_paths_that_do_not_work_are_named(place: Place, source: str, target: str) -> None:
    folder = place.source.parent
    place.source.write_text(line("a"))
    place.source, place.target = folder / source, folder / target
    with pytest.raises(ValueError, match="/no/"):
        place.run()


def test_unknown_model_leaves_no_output(place: Place) -> None:
    place.source.write_text(line("a", text(model=None)))
    with pytest.raises(ValueError, match="no such model"):
        batch.run(EngineConfig(model="no such model"), str(place.source), str(place.target), quiet=True)
    assert not place.target.exists()


# ---- failures --------------------------------------------------------------------------------------------------------


def fails_after(tokens: int, *numbers: int) -> Any:
    def prepare(number: int, engine: FakeEngine) -> None:
        engine.fail_after_tokens = tokens if number in numbers else None

    return prepare


def test_lost_engine_is_replaced_and_nothing_is_lost(place: Place) -> None:
    maker = place.run(*(line(f"{i}") for i in range(40)), prepare=fails_after(100, 0, 1))
    assert len(maker.engines) == 3 and len(place.rows) == 40
    assert {row["response"]["status_code"] for row in place.rows.values()} == {200}


def test_engine_lost_for_good_keeps_what_is_done(place: Place) -> None:
    lines = [line(f"{i}") for i in range(40)]
    with pytest.raises(EngineDead, match=r"injected failure; \d+ of 40 are in .*out.jsonl; the same command"):
        place.run(*lines, prepare=fails_after(100, 0), restart=False)
    assert 0 < len(place.rows) < 40
    place.run()
    assert len(place.rows) == 40


def test_model_that_cannot_load_is_told_once(
    place: Place, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(number: int, engine: FakeEngine) -> None:
        engine.start_error = UnsupportedModel("gates of another kind")

    with pytest.raises(UnsupportedModel, match="gates of another kind"):
        place.run(line("a"), prepare=prepare, quiet=True)
    assert "gates" not in caplog.text + capsys.readouterr().err


def test_interrupt_keeps_what_is_done(
    place: Place, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def prepare(number: int, engine: FakeEngine) -> None:
        async def interrupt() -> None:
            while not place.target.stat().st_size:
                await asyncio.sleep(0)
            signal.raise_signal(signal.SIGINT)

        engine.interrupting = asyncio.create_task(interrupt())  # type: ignore[attr-defined]

    with pytest.raises(KeyboardInterrupt):
        place.run(*(line(f"{i}") for i in range(100)), prepare=prepare, max_sequences=8)
    done = len(place.rows)
    assert 0 < done < 100 and f"{done} of 100 are in " in capsys.readouterr().err


def test_standard_streams(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    config = EngineConfig(model="fake")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line("a").encode())))
    batch.run(config, "-", "-", quiet=True, engine_maker=lambda config: Maker(config, healthy))
    assert json.loads(capfdbinary.readouterr().out)["custom_id"] == "a"


def test_an_output_that_is_no_file_is_refused_and_not_read(place: Place) -> None:
    """What is there already is read first: of a device, for ever."""
    os.mkfifo(place.target)
    with pytest.raises(ValueError, match=r"out\.jsonl is not a regular file.*- for standard output"):
        place.run(line("a"))
