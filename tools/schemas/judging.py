"""Whether an answer is valid: by `jsonschema`, with formats checked by Python's own readers of them."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import urllib.parse
import uuid
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for

CHECKER = FormatChecker(formats=())
_MARK = "\ue000"


def _exact(value: Any) -> Any:
    """As JSON with decimals: multipleOf 0.01 has no answer that doubles agree on."""
    return json.loads(value if isinstance(value, str) else json.dumps(value), parse_float=Decimal)


def fault(schema: Any, text: str) -> str | None:
    """Why a text is no valid answer; None for one that is."""
    exact = _exact(schema)
    kind = validator_for(exact, default=Draft202012Validator) if isinstance(exact, dict) else Draft202012Validator
    try:
        instance = _exact(text)
    except ValueError as error:
        return f"no JSON: {error}"
    for error in kind(exact, format_checker=CHECKER).iter_errors(instance):
        return f"{error.json_path}: {error.message[:200]}"
    parsed = json.loads(text, parse_float=_as_written, parse_int=_as_written)
    if re.sub(f'"{_MARK}|{_MARK}"', "", json.dumps(parsed, ensure_ascii=False)) != text:
        return "written otherwise than json.dumps writes it"
    return None


def _as_written(number: str) -> str:
    """A number that json.dumps leaves as it was read, between two marks."""
    return f"{_MARK}{number}{_MARK}"


def _reads(name: str, read: Any) -> None:
    @CHECKER.checks(name, raises=ValueError)
    def check(value: object) -> bool:
        return not isinstance(value, str) or read(value) is not False


def _time(text: str) -> bool:
    datetime.datetime.fromisoformat(f"2000-01-01T{text}")
    return re.search("(Z|[+-][0-9]{2}:[0-9]{2})$", text) is not None


def _date_time(text: str) -> bool:
    datetime.date.fromisoformat(text[:10])
    return text[10] == "T" and _time(text[11:])


_URI = re.compile(r"[!#$%&'()*+,./0-9:;=?@A-Z_a-z~\[\]-]+")


def _uri(text: str) -> bool:
    split = urllib.parse.urlsplit(text)
    return (
        bool(split.scheme)
        and split.port != -1
        and re.fullmatch(r"[!#$%&'()*+,./0-9:;=?@A-Z_a-z~\[\]-]+", text) is not None
    )


_LABEL = re.compile(r"(?!-)[\w-]{1,63}(?<!-)")


def _duration(text: str) -> bool:
    parts = re.fullmatch(r"P(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?|P\d+W", text)
    return parts is not None and text[-1] not in "PT"


_reads("date", datetime.date.fromisoformat)
_reads("time", _time)
_reads("date-time", _date_time)
_reads("email", lambda text: text.count("@") == 1 and "" not in re.split("[@.]", text))
_reads(
    "hostname",
    lambda text: len(text) < 254 and all(re.fullmatch(r"(?!-)[\w-]{1,63}(?<!-)", part) for part in text.split(".")),
)
_reads("ipv4", ipaddress.IPv4Address)
_reads("ipv6", ipaddress.IPv6Address)
_reads("uuid", uuid.UUID)
_reads("uri", _uri)
_reads("duration", _duration)
_reads("json-pointer", lambda text: re.fullmatch("(/([^~/]|~[01])*)*", text) is not None)
