"""`headrace batch`: a file of requests in OpenAI's batch form in, a file of answers out."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from headrace.config import EngineConfig
from headrace.console import ProgressLine, err, loading
from headrace.engine.capacity import model_folder
from headrace.logs import shown
from headrace.progress import Answering, untold
from headrace.server.batch import Answer, BatchInput, answer_row, answers, bad_row, lost_row, read_requests, unbounded
from headrace.types import EngineDead, Metrics

if TYPE_CHECKING:
    from headrace.server.in_process import InProcessServer
    from headrace.server.state import MakeEngine

log = logging.getLogger("headrace.server")

ROW_START = b'{"id":"batch_req_'
"""How each row of ours begins: a torn last line that does not is no row of ours."""


def run(
    config: EngineConfig,
    source: str,
    target: str,
    *,
    quiet: bool,
    engine_maker: Callable[[EngineConfig], MakeEngine] | None = None,
) -> None:
    """Raises ValueError for files that cannot be used, EngineDead for an engine that is lost for good, OSError for
    an output that takes no more. What is in the output by then remains, and the next run leaves it out."""
    given = _read(source, target)
    given.check_model(_name(source, "standard input"), config.served)
    config = unbounded(config)
    make_engine = (engine_maker or _engine_maker)(config)
    with _opened(target) as out:
        done = set[str]() if target == "-" else _answered(out, target, given)
        batch = Batch(config, given, done, out, _name(target, "standard output"), quiet)
        try:
            asyncio.run(batch.run(make_engine))
        except KeyboardInterrupt:
            err.print(batch.kept, markup=False)
            raise
        except EngineDead as end:
            raise EngineDead(f"{end}; {batch.kept}") from None


def _engine_maker(config: EngineConfig) -> MakeEngine:
    """Raises ValueError if there is no such model."""
    model_folder(config.model.folder)

    async def make() -> Any:
        from headrace.engine.async_llm import AsyncLLM

        return AsyncLLM(config)

    return make


def _name(path: str, stream: str) -> str:
    return stream if path == "-" else path


# ---- the input -------------------------------------------------------------------------------------------------------


def _read(source: str, target: str) -> BatchInput:
    if source == "-":
        found = read_requests(sys.stdin.buffer)
    else:
        if target != "-" and Path(target).exists() and Path(source).exists() and Path(source).samefile(target):
            raise ValueError(f"{target} is the input too: name another file for the output")
        try:
            with open(source, "rb") as file:
                found = read_requests(file)
        except OSError as error:
            raise ValueError(f"cannot read {source}: {error.strerror}") from None
    found.check_form(_name(source, "standard input"))
    return found


# ---- the output ------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(target: str) -> Iterator[BinaryIO]:
    """The output, to be read and appended to, by this process alone."""
    if target == "-":
        yield sys.stdout.buffer
        return
    with _appending(target) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another batch is writing {target}") from None
        yield file


def _appending(target: str) -> BinaryIO:
    if Path(target).exists() and not Path(target).is_file():
        raise ValueError(f"{target} is not a regular file: name a file for the answers, or - for standard output")
    try:
        return open(target, "ab+")
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror}") from None


class _Response(msgspec.Struct):
    status_code: int


class _Row(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: Any


def _answered(out: BinaryIO, target: str, given: BatchInput) -> set[str]:
    """Ids of the rows that stay as they are. A torn last line is cut off.

    Raises ValueError if the file holds anything else than answers to these requests.
    """
    ids = {request.custom_id: request.id for request in given.requests} if out.seek(0, 2) else {}
    done, whole = set[str](), 0
    out.seek(0)
    for number, line in enumerate(out, 1):
        if not line.endswith(b"\n") and line.startswith(ROW_START[: len(line)]):
            break
        row = _row(line, f"{target}, line {number}")
        if row.response is None or row.response.status_code < 500:
            done.add(row.id)
        if row.response is not None and ids.get(row.custom_id or "") != row.id:
            raise ValueError(
                f"{target}, line {number} answers a request that the input does not have (custom_id "
                f"{shown(row.custom_id)!r}): name another file for the output"
            )
        whole += len(line)
    out.truncate(whole)
    return done


def _row(line: bytes, where: str) -> _Row:
    try:
        return msgspec.json.decode(line, type=_Row)
    except ValueError:
        raise ValueError(f"{where} is no row of a batch's output: name another file for the output") from None


# ---- the run ---------------------------------------------------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Error(msgspec.Struct):
    message: str = ""


class _Reply(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)
    error: _Error | None = None


class Batch:
    """One run: what is still to be answered, and what has been. Invariant: `out` ends with a whole row."""

    def __init__(
        self, config: EngineConfig, given: BatchInput, done: set[str], out: BinaryIO, name: str, quiet: bool
    ) -> None:
        self.config, self.out, self.name, self.quiet = config, out, name, quiet
        self.requests = [request for request in given.requests if request.id not in done]
        self.bad = [bad for bad in given.bad if bad.id not in done]
        self.total = len(given.requests) + len(given.bad)
        self.earlier = self.total - len(self.requests) - len(self.bad)
        self.rows = self.refused = 0
        self.refusal = ""

    @property
    def kept(self) -> str:
        there = f"{self.earlier + self.rows:,} of {self.total:,} are in {self.name}"
        return there if self.name == "standard output" else f"{there}; the same command answers the others"

    async def run(self, make_engine: MakeEngine) -> None:
        if self.earlier:
            self._say(f"{self.earlier:,} of {self.total:,} are in {self.name} already")
        for bad in self.bad:
            self._write(bad_row(bad))
            self._refuse(f"line {bad.line}: {bad.message}")
        if self.requests:
            await self._answer_all(make_engine)
        if self.refused:
            which = ", the first is" if self.refused > 1 else ":"
            told = f"{self.refused:,} of {self.total:,} refused{which} {self.refusal}"
            err.print(told, style="yellow", markup=False)

    async def _answer_all(self, make_engine: MakeEngine) -> None:
        from headrace.server.in_process import in_process  # a web framework, which a refusal need not wait for

        async with in_process(make_engine, self.config) as server:
            with nullcontext(untold) if self.quiet else loading(self.config.model.folder) as phases:
                await server.ready(phases)
            answering = Answering(len(self.requests))
            with nullcontext() if self.quiet else _progress(server, answering):
                await self._ask(server, answering)
        self._say(answering.summary())

    async def _ask(self, server: InProcessServer, answering: Answering) -> None:
        asked = answers(server, self.requests, 2 * self.config.scheduler.max_sequences)
        async with aclosing(asked):
            async for answer in asked:
                self._write(_row_of(answer))
                self._note(answer, answering)

    def _note(self, answer: Answer, answering: Answering) -> None:
        reply = msgspec.json.decode(answer.body or b"{}", type=_Reply)
        used = reply.usage
        if answer.status == 200:
            cached = used.prompt_tokens_details.cached_tokens
            tokens = Metrics(
                prompt_tokens=used.prompt_tokens, cached_tokens=cached, output_tokens=used.completion_tokens
            )
            answering.metrics.append(tokens)
        else:
            answering.failed += 1
            why = reply.error.message if reply.error else "the engine failed with it"
            self._refuse(f"line {answer.request.line} (custom_id {shown(answer.request.custom_id)!r}): {why}")

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self.refusal = self.refusal or why

    def _write(self, row: bytes) -> None:
        """Raises OSError, which says what is there, for an output that takes no more."""
        try:
            self.out.write(row)
            self.out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(f"cannot write {self.name}: {error.strerror}; {self.kept}") from None
        self.rows += 1

    def _say(self, line: str) -> None:
        if not self.quiet:
            err.print(line, style="dim", markup=False)


def _row_of(answer: Answer) -> bytes:
    return answer_row(answer.request, answer.status, answer.body) if answer.status else lost_row(answer.request)


@contextmanager
def _progress(server: InProcessServer, answering: Answering) -> Iterator[None]:
    """A line about the answers so far. It makes room for what the server logs (an engine that is started again)."""

    def tell() -> str:
        answering.written = server.state.stats().tokens.generated
        return answering.text(*server.reading())

    def make_room(record: logging.LogRecord) -> bool:
        with line.hidden():
            return True

    with ProgressLine(tell, answering.share) as line:
        log.addFilter(make_room)
        try:
            yield
        finally:
            log.removeFilter(make_room)
