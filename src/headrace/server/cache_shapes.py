"""Replies of the cache's routes, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from headrace.server.shapes import Figures, PromptUsage


class CacheSegment(TypedDict):
    object: Literal["cache.segment"]
    id: str
    parent: str | None
    owner: str | None
    private: bool
    start: int
    tokens: int
    chunks: int
    bytes: int
    children: int
    holders: int
    hits: int
    reused_tokens: int
    pinned_tokens: int
    stored_tokens: int
    last_used: int


class SegmentPage(TypedDict):
    object: Literal["list"]
    data: list[CacheSegment]
    has_more: bool
    next: str | None


class CacheReset(TypedDict):
    object: Literal["cache.reset"]
    chunks: int


class Prefix(TypedDict):
    id: str
    object: Literal["cache.prefix"]
    kind: Literal["prefix", "cache_control"]
    tokens: int
    chunks: int
    bytes: int
    ttl_seconds: float
    expires_at: int


class NewPrefix(Prefix):
    cached_tokens: int
    usage: PromptUsage
    headrace: Figures


class PrefixList(TypedDict):
    object: Literal["list"]
    data: list[Prefix]


class Released(TypedDict):
    id: str
    object: Literal["cache.prefix"]
    deleted: Literal[True]
