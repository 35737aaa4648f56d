"""Names of sessions, and codes of what cannot be done with them. No torch: servers check names too."""

from __future__ import annotations

import re

from headrace.types import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

NOT_FOUND, FULL, DAMAGED, NO_STORAGE = "session_not_found", "sessions_full", "session_damaged", "sessions_storage"


def check_name(name: str) -> None:
    """Raises InvalidRequest for what no session can be called."""
    if not NAME.fullmatch(name):
        told = "name must have 1 to 100 letters, digits, dots, dashes and underscores, a letter or digit first"
        raise InvalidRequest(told, "name")


def missing(name: str) -> InvalidRequest:
    return InvalidRequest(f"no session {name!r} is saved", "name", NOT_FOUND)
