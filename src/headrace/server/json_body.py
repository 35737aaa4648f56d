"""Bodies of requests as JSON, bounded: what is parsed and checked holds all other requests up meanwhile."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from headrace.server.errors import ApiError, invalid

MAX_VALUES = 1_500_000
"""Commas in a body, those of texts too: some more than there can be token ids in the largest context."""
MAX_OBJECTS = 50_000
MAX_MEMBERS = 4096
"""Members of one object."""

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def json_object(raw: bytes) -> dict[str, Any]:
    """The object that a body is, in UTF-8. NaN and Infinity pass here so that the field that holds them can be named;
    the models refuse them. Raises ApiError."""
    if raw.count(b",") > MAX_VALUES:
        raise _too_much(f"{MAX_VALUES:,} values")
    try:
        text = raw.decode("utf-8-sig")  # json.loads would take halves of surrogate pairs, and UTF-16 with them
        value = json.loads(text, object_pairs_hook=_Objects().made)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        why = "a number has too many digits" if "integer string conversion" in why else why
        raise ApiError(400, f"the body is not valid JSON: {why}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", None, "invalid_json")
    if SURROGATE.search(text):
        _check_text(value)
    return value


class _Objects:
    """Makes the objects of one body, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def made(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self.count += 1
        if self.count > MAX_OBJECTS:
            raise _too_much(f"{MAX_OBJECTS:,} objects")
        if len(pairs) > MAX_MEMBERS:
            raise _too_much(f"{MAX_MEMBERS:,} members in one object")
        out = dict(pairs)
        if len(out) != len(pairs):
            counted = Counter(name for name, _ in pairs)
            twice = next(name for name, times in counted.items() if times > 1)
            raise invalid(f"{twice!r} appears twice in one object", twice)
        return out


def _too_much(what: str) -> ApiError:
    return ApiError(400, f"the body has more than {what}; send less at once", None, "body_too_large")


def _check_text(fields: dict[str, Any]) -> None:
    """Half a surrogate pair is valid JSON and no text: no tokenizer takes it."""
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise invalid("half a surrogate pair is not text", ascii(name)[1:-1], "invalid_value") from None
