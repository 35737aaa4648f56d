"""What a text is: characters that UTF-8 has."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest


def check_text(text: Any, param: str) -> None:
    """Raises InvalidRequest naming `param` for anything but a well-formed string."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{param} must be a string, got {type(text).__name__}", param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        told = f"{param} is no text at character {error.start}: a byte that is not UTF-8, or half a surrogate pair"
        raise InvalidRequest(told, param) from None
