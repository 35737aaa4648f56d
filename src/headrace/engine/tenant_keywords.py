"""Keywords of a request that say whose it is and what that gives it: the fields of the same names in a Request."""

from __future__ import annotations

from typing import Any, TypedDict


class TenantKeywords(TypedDict, total=False):
    """All may be left out."""

    tenant: str
    weight: float
    priority: int
    kv_share: float
    kv_limit: float
    tier_quota: float | None


def taken_from(keywords: dict[str, Any]) -> TenantKeywords:
    """Takes them out of keywords of all kinds."""
    found: Any = {name: keywords.pop(name) for name in TenantKeywords.__annotations__ if name in keywords}
    own: TenantKeywords = found
    return own
