"""JSON Schema's keywords by what is made of them, and the refusal of a part of a schema."""

from __future__ import annotations

import re
from typing import Any

from headrace.errors import InvalidRequest

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

DRAFTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/schema": 2020,
    "spec.openapis.org/oas/3.1/dialect/base": 2020,
}
"""By `$schema` without its scheme and an empty fragment."""

IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
"""What applies to the same value as the keywords beside it, and is not read together with those."""

_OWN = "check it in your own code"
REFUSED = {
    "not": "say what is allowed instead, with enum, type or pattern",
    "if": "write the cases as anyOf, each with its own properties",
    "dependentRequired": "write the cases as anyOf, each with its own required",
    "dependentSchemas": "write the cases as anyOf, each with its own properties",
    "dependencies": "write the cases as anyOf, each with its own required",
    "contains": _OWN,
    "uniqueItems": f"leave it out, and {_OWN}",
    "unevaluatedItems": "write items: false beside prefixItems",
    "unevaluatedProperties": "write additionalProperties: false in each case of the anyOf or allOf",
    "propertyNames": "write patternProperties with additionalProperties: false",
    "$dynamicRef": "write $ref",
    "$recursiveRef": "write $ref",
    "x-guidance": "leave it out: the server sets the options of the grammar",
    "disallow": "write a schema of draft 4 or later",
    "extends": "write allOf",
    "divisibleBy": "write multipleOf",
}
"""Keywords that say which answers are valid and cannot be enforced, with the remedy."""


_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")


class Refused(InvalidRequest):
    """A part of a schema that cannot be taken: the part's JSON pointer, the reason, the remedy."""

    def __init__(self, pointer: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{pointer}: {reason}{f'; {remedy}' * bool(remedy)}", "structured")
        self.pointer = pointer


def below(pointer: str, *names: str | int) -> str:
    """The pointer of a part below this one."""
    return "/".join([pointer, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])


def draft_of(schema: Any) -> int:
    """The year or the number of a schema's draft; 2020 where `$schema` says nothing. Raises Refused."""
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if uri is None:
        return 2020
    told = str(uri).removesuffix("#").partition("://")[2]
    if told not in DRAFTS:
        raise Refused(
            "#/$schema", f"{str(uri)[:100]!r} is no dialect that is known here", "use draft 4, 6, 7, 2019-09 or 2020-12"
        )
    return DRAFTS[told]


def unwritable(text: str) -> bool:
    """Whether a text has a character for which JSON needs \\uXXXX, which answers do not contain."""
    return _UNWRITABLE.search(text) is not None
