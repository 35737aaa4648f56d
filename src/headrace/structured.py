"""What shape an answer must have: a JSON Schema, any JSON object, an expression, one of some texts, a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from headrace.errors import InvalidRequest

MAX_CHOICES = 1024
MAX_LENGTH = 1 << 20
"""Characters of a schema, an expression or a grammar."""


@dataclass(frozen=True, slots=True)
class Structured:
    """The shape of an answer; exactly one of:

    - `json`: a JSON Schema, as a dict or its JSON text (kept as text). `json_object`: any JSON object.
    - `regex`: a regular expression that the whole answer matches.
    - `choice`: texts, one of which the answer is.
    - `grammar`: a grammar in Lark's form, as llguidance reads it.

    Raises InvalidRequest (a ValueError with `.param`) for none or several, and for what is no such thing.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __init__(
        self,
        json: Any = None,
        json_object: bool = False,
        regex: str | None = None,
        choice: Any = (),
        grammar: str | None = None,
    ) -> None:
        if isinstance(choice, list) and not choice:
            self._check_choice(())
        listed = tuple(choice or ()) if isinstance(choice, list | tuple | None) else choice
        given = {"json": _schema_text(json), "json_object": json_object, "regex": regex, "choice": listed,
                 "grammar": grammar}  # fmt: skip
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self._check()

    @property
    def kind(self) -> str:
        """Which of the fields is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) not in (None, False, ()))

    def _check(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False, ())]
        if len(given) != 1:
            told = " and ".join(given) or "none"
            raise InvalidRequest(f"give one of json, json_object, regex, choice, grammar; got {told}", "structured")
        value = getattr(self, given[0])
        if given[0] == "choice":
            self._check_choice(value)
        elif given[0] == "json_object":
            if value is not True:
                raise InvalidRequest("json_object must be true or false", "structured")
        elif not isinstance(value, str) or not 0 < len(value) <= MAX_LENGTH:
            raise InvalidRequest(f"{given[0]} must be a text of 1 to {MAX_LENGTH:,} characters", "structured")

    @staticmethod
    def _check_choice(value: Any) -> None:
        if not isinstance(value, tuple) or not 0 < len(value) <= MAX_CHOICES:
            raise InvalidRequest(f"choice must be a list of 1 to {MAX_CHOICES} texts", "structured")
        if not all(isinstance(text, str) and 0 < len(text) <= MAX_LENGTH for text in value):
            raise InvalidRequest("choice: every entry must be a text that is not empty", "structured")


def _schema_text(schema: Any) -> Any:
    if schema is None or isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"json must be a JSON Schema: {error}", "structured") from None
