"""JSON Schema's `format` as patterns: every text that a pattern matches is of the format.

A pattern may allow less than its format (a hostname of at most seven labels, a URI without an IPv6 host, years from 1),
never more: days exist in their month and year, seconds end at 59. Upper bounds also end what a model would write for
ever.
"""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # 04, 08, ... 96
_LEAP = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_N = "[0-9]{1,6}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_CALENDAR = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|{_N}W)"

_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,15}"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,6}}"
_NAME = "[a-zA-Z0-9_+~-]{1,20}"
_EMAIL = rf"{_NAME}(?:\.{_NAME}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,6}}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_H16 = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Eight groups, or `::` with at most seven beside it."""
    forms = [f"(?:{_H16}:){{7}}{_H16}"]
    for left in range(8):
        before = f"{_H16}(?::{_H16}){{{left - 1}}}" if left else ""
        after = f"(?:{_H16}(?::{_H16}){{0,{6 - left}}})?" if left < 7 else ""
        forms.append(f"{before}::{after}")
    return f"(?:{'|'.join(forms)})"


_PCHAR = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_TAIL = rf"(?:/{_PCHAR}{{0,64}}){{0,16}}(?:\?(?:{_PCHAR}|[/?]){{0,256}})?(?:#(?:{_PCHAR}|[/?]){{0,256}})?"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]{0,15}"
_URI = rf"{_SCHEME}:(?://{_HOSTNAME}(?::[0-9]{{1,5}})?{_TAIL}|{_PCHAR}{{1,64}}{_TAIL})"
_RELATIVE = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=@-]|%[0-9a-fA-F]{{2}}){{0,64}}{_TAIL}"
_POINTER = r"(?:/(?:[^~/]|~[01]){0,64}){0,32}"


def _uuid(version: str = "[0-9a-fA-F]") -> str:
    return f"[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{12}}"


def _base64(alphabet: str) -> str:
    one = f"[{alphabet}]"
    return f"(?:{one}{{4}})*(?:{one}{{2}}==|{one}{{3}}=)?"


_WHOLE = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "ipvanyaddress": f"(?:{_IPV4}|{_ipv6()})",
    "uuid": _uuid(),
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "iri-reference": f"(?:{_URI}|{_RELATIVE})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,5}})(?:#|{_POINTER})",
    "byte": _base64("A-Za-z0-9+/"),
    "base64": _base64("A-Za-z0-9+/"),
    "base64url": _base64("A-Za-z0-9_-"),
}

PATTERNS = {name: f"^(?:{whole})$" for name, whole in _WHOLE.items()}
"""By name of the format: a pattern of ECMA-262 for the whole text."""

ANNOTATIONS = frozenset({
    "int32", "int64", "float", "double", "decimal", "password", "binary", "path", "file-path", "directory-path",
})  # fmt: skip
"""Formats of OpenAPI and pydantic for storing or showing a value, not for which texts are allowed; they ask nothing."""
