"""OpenAI's batch form: lines of a file become requests, answers become rows.

No web framework is imported here, so that a file of another form is refused at once.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from headrace.config import EngineConfig
from headrace.config.served import ServedNames
from headrace.logs import shown

CHAT, TEXT = URLS = ("/v1/chat/completions", "/v1/completions")

MOST_BYTES = 16 * 2**20
"""Bodies under way at one time. Token ids take about ten times the memory of their text, in two processes."""

MOST_LOSSES = 3
"""A request that was under way so often when the engine failed is given up. The last time it is alone with the engine,
so that it is no other one's fault."""

FORM = {
    CHAT: '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"messages": [{"role": "user", "content": "..."}], "max_tokens": 100}}',
    TEXT: '{"custom_id": "1", "method": "POST", "url": "/v1/completions", '
    '"body": {"prompt": "...", "max_tokens": 100}}',
}
"""How a line must look."""


@dataclass(slots=True)
class BatchRequest:
    """One good line. `sequences`: how many answers it asks for."""

    line: int
    custom_id: str
    url: str
    body: bytes
    model: str | None = None
    sequences: int = 1
    losses: int = 0

    @property
    def id(self) -> str:
        """The same for the same request, so that a resumed run sees what an earlier one has answered."""
        told = b"\0".join((self.custom_id.encode(), self.url.encode(), self.body))
        return f"batch_req_{blake2b(told, digest_size=16).hexdigest()}"


@dataclass(slots=True, eq=False)
class BadLine(Exception):
    """A line that is no request. `looks_like`: the form it should have had, where the form is at fault."""

    line: int
    code: str
    message: str
    custom_id: str | None = None
    looks_like: str = ""
    id: str = ""
    """The same for the same line, wherever in the file it stands; set as it is read."""


@dataclass(slots=True)
class BatchInput:
    """What a file asks for: good lines in the order in which they should be asked, and the others."""

    requests: list[BatchRequest] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)

    def check_form(self, name: str) -> None:
        """Raises ValueError if no line is a request."""
        if self.requests:
            return
        if not self.bad:
            raise ValueError(f"{name} holds no requests: it has no line that is not empty")
        first = self.bad[0]
        others = f", and no other of the {len(self.bad):,} lines is one" if len(self.bad) > 1 else ""
        form = f". A line must look like this: {first.looks_like}" if first.looks_like else ""
        raise ValueError(
            f"{name} is not in OpenAI's batch form. Line {first.line} is no request ({first.message}){others}{form}"
        )

    def check_model(self, name: str, served: ServedNames) -> None:
        """Raises ValueError if every request names another model: each would be answered with 404."""
        named = {request.model for request in self.requests}
        if any(model is None or model in served for model in named):
            return
        first = next(iter(self.requests)).model
        told = f"all requests of {name} are for other models than {served.told}, as for {shown(first)!r}"
        if len(named) > 1:
            raise ValueError(f"{told}: leave model out of their bodies")
        raise ValueError(f"{told}: leave model out of their bodies, or give --served-model-name {shown(first)}")


# ---- lines -----------------------------------------------------------------------------------------------------------


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()
    prompt: Any = None
    messages: Any = None


class _Body(msgspec.Struct):
    """The fields of a body that matter here. The server looks at all of it."""

    model: Any = None
    stream: Any = None
    n: Any = None
    prompt: Any = None
    messages: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None


def read_requests(lines: Iterable[bytes]) -> BatchInput:
    """The requests in the order in which they should be asked: those with a common beginning are neighbours."""
    found, keys, seen, alike = BatchInput(), [], dict[str, int](), Counter[bytes]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request, key = _request(number, line, seen)
        except BadLine as bad:
            told = blake2b(line.strip(), digest_size=16)
            alike[told.digest()] += 1
            bad.id = f"batch_req_{told.hexdigest()}_{alike[told.digest()]}"
            found.bad.append(bad)
            continue
        found.requests.append(request)
        keys.append(key)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    found.requests = [found.requests[i] for i in order]
    return found


def _request(number: int, raw: bytes, seen: dict[str, int]) -> tuple[BatchRequest, bytes]:
    """A request and what it is sorted by. Raises BadLine."""
    line = _parsed(number, raw, seen)
    known = line.custom_id if isinstance(line.custom_id, str) and line.custom_id else None
    url = _url(line)

    def bad(code: str, message: str, custom_id: str | None = known, form: bool = True) -> BadLine:
        return BadLine(number, code, message, custom_id, FORM[url] if form else "")

    if known in seen:
        # Without the id: whoever joins by it shall find one row.
        raise bad("duplicate_custom_id", f"custom_id {shown(known)!r} is that of line {seen[known]} too", None, False)
    if known is not None:
        seen[known] = number
    body = bytes(line.body)
    if not body and line.url is None:
        raise bad("missing_required_parameter", _only(line))
    if known is None:
        raise bad("missing_required_parameter", "custom_id must be a text that is not empty")
    if line.method != "POST":
        raise bad("invalid_method", f"method is {shown(line.method)!r}; only POST is possible", form=False)
    if line.url not in URLS:
        raise bad("invalid_url", f"url is {shown(line.url)!r}; possible are {CHAT} and {TEXT}", form=False)
    if not body.startswith(b"{"):
        raise bad("missing_required_parameter", "body is missing, or no object")
    peeked = _peek(body)
    if peeked.stream:
        raise bad("unsupported_parameter", "an answer in a file is not streamed; leave stream out", form=False)
    model = peeked.model if isinstance(peeked.model, str) else None
    request = BatchRequest(number, known, line.url, body, model, _sequences(peeked))
    return request, _prefix(line.url, peeked)


def _parsed(number: int, raw: bytes, seen: dict[str, int]) -> _Line:
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return msgspec.json.decode(raw, type=_Line)
    except msgspec.ValidationError:
        raise BadLine(number, "invalid_json_line", "it is JSON, but no object", looks_like=FORM[CHAT]) from None
    except (ValueError, RecursionError) as error:
        if (known := _id_of_no_text(raw)) is not None:
            first = seen.setdefault(known, number) == number
            raise BadLine(number, "invalid_value", HALF, known if first else None) from None
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadLine(number, "invalid_json_line", f"it is not valid JSON ({why})", looks_like=FORM[CHAT]) from None


HALF = "half a surrogate pair is not text"


def _id_of_no_text(raw: bytes) -> str | None:
    """The custom_id of a line that is JSON, but for half a surrogate pair in it; None: it is no such line."""
    try:
        line = json.loads(raw) if b"\\ud" in raw.lower() else None
        known = line.get("custom_id") if isinstance(line, dict) else None
        return known if isinstance(known, str) and known.encode() else None
    except (ValueError, RecursionError):
        return None


def _url(line: _Line) -> str:
    """The route that the line means, as far as it can be seen."""
    return TEXT if line.url == TEXT or (line.url is None and line.prompt is not None) else CHAT


def _only(line: _Line) -> str:
    held = [name for name in ("prompt", "messages") if getattr(line, name) is not None]
    return f"it has {' and '.join(held)} where url and body should be" if held else "url and body are missing"


def _peek(body: bytes) -> _Body:
    """Empty where the body cannot be read: the server says why."""
    try:
        return msgspec.json.decode(body, type=_Body)
    except (ValueError, RecursionError):
        return _Body()


def _sequences(body: _Body) -> int:
    many = isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int)
    return max(1, body.n if isinstance(body.n, int) else 1) * (len(body.prompt) if many else 1)


def _prefix(url: str, body: _Body) -> bytes:
    """Requests that share a beginning of the rendered prompt share one of this, without template and tokenizer. Empty
    where the body is nested too deeply: the server says so."""
    try:
        head = (_plain(body.cache_salt), url.encode(), _plain(body.chat_template_kwargs))
        return b"\0".join((*head, _plain(body.messages if url == CHAT else body.prompt)))
    except RecursionError:
        return b""


def _plain(value: Any) -> bytes:
    """Texts in their order: of a message its role and content, of a part its text."""
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, list):
        return b"\0".join(map(_plain, value))
    if isinstance(value, dict) and ("content" in value or "text" in value):
        return b"\0".join(_plain(value[name]) for name in ("role", "content", "text") if name in value)
    if type(value) is int and 0 <= value < 2**32:
        return value.to_bytes(4)
    return b"" if value is None else json.dumps(value).encode()


# ---- rows ------------------------------------------------------------------------------------------------------------


def answer_row(request: BatchRequest, status: int, body: bytes) -> bytes:
    response = {"status_code": status, "request_id": f"req_{request.id[10:]}", "body": msgspec.Raw(body)}
    return _row(request.id, request.custom_id, response, None)


def lost_row(request: BatchRequest) -> bytes:
    told = f"the engine failed {MOST_LOSSES} times with this request under way, the last time with no other"
    return _row(request.id, request.custom_id, None, {"code": "engine_lost", "message": told, "line": request.line})


def bad_row(bad: BadLine) -> bytes:
    told = {"code": bad.code, "message": f"line {bad.line}: {bad.message}", "line": bad.line}
    return _row(bad.id, bad.custom_id, None, told)


def _row(name: str, custom_id: str | None, response: Any, error: Any) -> bytes:
    row = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(row) + b"\n"


# ---- asking ----------------------------------------------------------------------------------------------------------


def unbounded(config: EngineConfig) -> EngineConfig:
    """Without a key, and with queues that refuse nothing: InFlight bounds what waits."""
    return config.replace(api_key=None, api_keys_file=None, max_queued_requests=2**40, max_queued_tokens=2**60)


class Answering(Protocol):
    """`headrace.server.in_process.InProcessServer`, and the fakes of the tests."""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]: ...

    async def ready(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` 0: the request was given up, since the engine failed with it again and again."""

    request: BatchRequest
    status: int
    body: bytes


class InFlight:
    """Requests under way. Invariant: together they ask for at most `most` sequences and hold at most MOST_BYTES, unless
    one alone is larger."""

    def __init__(self, server: Answering, most: int) -> None:
        self.server, self.most = server, most
        self.sequences = self.bytes = 0
        self.alone = False
        self.tasks: dict[asyncio.Task[tuple[int, bytes]], BatchRequest] = {}
        self._ended: asyncio.Queue[asyncio.Task[tuple[int, bytes]]] = asyncio.Queue()

    def fits(self, request: BatchRequest) -> bool:
        if not self.tasks:
            return True
        if self.alone or request.losses == MOST_LOSSES - 1:
            return False
        return self.sequences + request.sequences <= self.most and self.bytes + len(request.body) <= MOST_BYTES

    def ask(self, request: BatchRequest) -> None:
        task = asyncio.create_task(self.server.post(request.url, request.body))
        task.add_done_callback(self._ended.put_nowait)
        self.tasks[task] = request
        self.alone = request.losses == MOST_LOSSES - 1
        self.sequences += request.sequences
        self.bytes += len(request.body)

    async def next(self) -> Answer:
        """The next one that ends."""
        task = await self._ended.get()
        request = self.tasks.pop(task)
        self.sequences -= request.sequences
        self.bytes -= len(request.body)
        return Answer(request, *task.result())

    async def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def answers(server: Answering, requests: Iterable[BatchRequest], most: int) -> AsyncGenerator[Answer]:
    """Asks all, so many sequences at once, in the order given; answers come as they end.

    A request that was lost with its engine is asked again once there is another. Raises EngineDead if there is none.
    """
    waiting, under_way = deque(requests), InFlight(server, most)
    try:
        while waiting or under_way.tasks:
            while waiting and under_way.fits(waiting[0]):
                under_way.ask(waiting.popleft())
            answer = await under_way.next()
            if answer.status != 503:
                yield answer
                continue
            await server.ready()
            answer.request.losses += 1
            if answer.request.losses < MOST_LOSSES:
                waiting.append(answer.request)
            else:
                yield Answer(answer.request, 0, b"")
    finally:
        await under_way.cancel()
