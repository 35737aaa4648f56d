"""Prompts whose beginning is to stay in the cache: by a breakpoint of theirs, or as a prefix that is pinned by name.

Pins of breakpoints are soft: a client library sends breakpoints with every request. A caller has a few of them, the
oldest gives way to a new one, and to a prefix that is pinned by name; where there is no room, the request is answered
all the same, and its reply says why.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headrace.engine.calls import PinPrefix, ReleasePrefix
from headrace.server.breakpoints import AskedPin, Pinned
from headrace.server.engine import ServedEngine
from headrace.server.job import Job
from headrace.server.tenants import Tenant
from headrace.types import CHUNK, InvalidRequest

SOFT, NAMED = "breakpoint_", "prefix_"
"""How ids begin that the server makes."""

FULL = "pins_full"
"""The engine's code for no room."""

NO_ROOM = "there is no room for more pinned prefixes: release one, wait for one to end, or pin a shorter one"
"""What the engine says of it counts other callers' too."""

MOST_CALLERS = 1024
"""Whose breakpoints are remembered; those of others end by their time."""


def owner_of(tenant: Tenant, salt: str | None) -> str:
    """Whose a pin is: a tenant's; without a file of keys, of those who send the same cache_salt. salt: the engine's."""
    return tenant.name or ("" if salt is None else f"salt:{salt}")


def made_id(begins: str, tokens: Sequence[int], salt: str | None, adapter: str = "") -> str:
    """The same for the same prefix."""
    name = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=12, person=b"prefix")
    name.update((salt or "").encode("utf-8", "surrogatepass"))
    if adapter:
        name.update(b"\0adapter " + adapter.encode("utf-8", "surrogatepass"))
    return begins + name.hexdigest()


class PromptPins:
    """most: soft pins of one caller; 0: breakpoints are not looked at."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._soft: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()

    async def take(self, engine: ServedEngine, job: Job) -> None:
        """Pins what the job asks for, and notes in it what has become of that. Raises InvalidRequest where a prefix
        that is pinned by name cannot be."""
        job.pinned = Pinned()
        for asked in job.prompts[0].pins:
            try:
                told = await self._pin(engine, job, asked)
            except InvalidRequest as error:
                told_why = NO_ROOM if error.code == FULL else str(error)
                if asked.id:
                    raise InvalidRequest(told_why, error.param, error.code) from None
                job.pinned.refused = told_why
                continue
            if told["tokens"] >= job.pinned.tokens:
                job.pinned.tokens, job.pinned.expires_in_s = told["tokens"], told["expires_in_s"]
            job.pinned.prefix = told

    async def _pin(self, engine: ServedEngine, job: Job, asked: AskedPin) -> dict[str, Any]:
        owner, tokens = owner_of(job.tenant, job.cache_salt), list(job.prompts[0].ids[: asked.tokens])
        whole = tokens[: len(tokens) // CHUNK * CHUNK]
        start = engine.capacity.adapter_start(job.adapter, job.prompts[0].ids) if job.adapter else 0
        call = PinPrefix(
            asked.id or made_id(SOFT, whole, job.cache_salt, job.adapter),
            tokens,
            asked.ttl_s,
            tenant=owner,
            salt=job.cache_salt,
            public_prefix_tokens=max(job.public_prefix_tokens, job.prompts[0].public_tokens),
            after=job.prompt_id(0),
            soft=not asked.id,
            adapter=job.adapter,
            adapter_start=start,
        )
        own = self._soft_of(owner)
        if not asked.id and call.id not in own and len(own) >= self.most:
            await self._give_way(engine, owner, own)
        while True:
            try:
                told: dict[str, Any] = await engine.call(call)
            except InvalidRequest as error:
                if error.code != FULL or not own:
                    raise
                await self._give_way(engine, owner, own)
                continue
            if not asked.id:
                own[call.id] = None
                own.move_to_end(call.id)
            return told

    def _soft_of(self, owner: str) -> OrderedDict[str, None]:
        """The caller's soft pins, oldest first; some may have ended."""
        own = self._soft.setdefault(owner, OrderedDict())
        self._soft.move_to_end(owner)
        if len(self._soft) > MOST_CALLERS:
            self._soft.popitem(last=False)
        return own

    async def _give_way(self, engine: ServedEngine, owner: str, own: OrderedDict[str, None]) -> None:
        oldest, _ = own.popitem(last=False)
        with suppress(InvalidRequest):  # its time is over
            await engine.call(ReleasePrefix(oldest, owner))
