"""The routes of the cache: /v1/cache/tree, whose chunks are told to their own tenant, and /v1/cache/reset."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import QueryParams
from starlette.responses import Response

from headrace.engine.calls import ResetPrefixCache, TreePage
from headrace.server.cursors import Cursors
from headrace.server.errors import ApiError, JsonReply, invalid
from headrace.server.guard import TENANT
from headrace.server.state import ServerState
from headrace.server.stream import unless_gone
from headrace.server.tenants import Tenant
from headrace.types import check_sharing

PAGE, MOST_PAGE = 100, 500
"""Segments of a page of the tree."""


def install_cache(router: APIRouter, state: ServerState) -> None:
    tree = CacheTree(state)

    @router.get("/v1/cache/tree")
    async def page(request: Request) -> Response:
        return JsonReply(await unless_gone(request.receive, tree.page(tenant_of(request), request.query_params)))

    @router.post("/v1/cache/reset")
    async def reset(request: Request) -> Response:
        check_query(request.query_params, set())
        check_operator(tenant_of(request), "forget what all tenants have cached")
        forgotten = await unless_gone(request.receive, state.engine.call(ResetPrefixCache()))
        return JsonReply({"object": "cache.reset", "chunks": forgotten})


def tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.scope[TENANT]
    return tenant


def check_operator(tenant: Tenant, what: str) -> None:
    """Raises ApiError 403 unless what concerns all tenants is this one's business: it has the one key or there is none,
    or its rules say so."""
    if tenant.name and not tenant.rules.metrics:
        told = f"this key may not {what}; set metrics = true for its tenant"
        raise ApiError(403, told, None, "not_allowed")


def check_query(query: QueryParams, known: set[str]) -> None:
    """Raises ApiError for a parameter that is not known or given twice."""
    for name in query:
        if name not in known:
            raise invalid(f"unknown query parameter {name[:60]!r}", name[:60], "unknown_parameter")
        if len(query.getlist(name)) > 1:
            raise invalid(f"{name} is given twice", name)


class CacheTree:
    """Pages of the tree. A tenant gets one at a time: many that are asked for together hold up nobody else's."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._cursors = Cursors()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def page(self, tenant: Tenant, query: QueryParams) -> dict[str, Any]:
        """Raises ApiError naming the parameter at fault."""
        check_query(query, {"cache_salt", "limit", "after", "all"})
        everything = _flag(query, "all")
        if everything:
            check_operator(tenant, "see the sizes of all tenants' chunks")
        salt = query.get("cache_salt")
        if everything and salt is not None:
            raise invalid("cache_salt: all=true tells of every salt", "cache_salt")
        check_sharing(salt, 0)
        listing = (tenant.name, salt, "all" if everything else None)
        call = TreePage(tenant.salt(salt), everything, self._after(query, listing), _limit(query))
        async with self._turns[tenant.name]:
            answer = await self._state.engine.call(call)
        now = time.time()
        after = answer["after"]
        return {
            "object": "list",
            "data": [_told(segment, now) for segment in answer["segments"]],
            "has_more": after is not None,
            "next": None if after is None else self._cursors.sealed(tuple(after), listing),
        }

    def _after(self, query: QueryParams, listing: tuple[str | None, ...]) -> tuple[int, int, int, int] | None:
        cursor = query.get("after")
        if cursor is None:
            return None
        try:
            return self._cursors.opened(cursor, listing)
        except ValueError as error:
            raise invalid(f"after: {error}", "after") from None


def _told(segment: dict[str, Any], now: float) -> dict[str, Any]:
    idle_s = segment.pop("idle_s")
    return {"object": "cache.segment", **segment, "last_used": int(now - idle_s)}


def _limit(query: QueryParams) -> int:
    given = query.get("limit", str(PAGE))
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= MOST_PAGE):
        raise invalid(f"limit must be 1 to {MOST_PAGE}", "limit")
    return int(given)


def _flag(query: QueryParams, name: str) -> bool:
    given = query.get(name, "false").lower()
    if given not in ("true", "false", "1", "0"):
        raise invalid(f"{name} must be true or false", name)
    return given in ("true", "1")
