"""The base of all request bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """No coercion ('16' is not 16), no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def refusal_as(raw: Any, kind: str) -> Any:
    """A part {"type": "refusal", "refusal": text}, which OpenAI's models answer with, as a part of text of that kind;
    anything else as it is."""
    if not isinstance(raw, dict) or raw.get("type") != "refusal" or "text" in raw:
        return raw
    others = {name: value for name, value in raw.items() if name != "refusal"}
    return {**others, "type": kind, "text": raw.get("refusal")}
