"""Fields as they occur in clients' schemas, from which the families are built."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def text(most: int = 24, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def name(description: str = "") -> Schema:
    return {
        "type": "string",
        "pattern": "^[a-z][a-z0-9-]{0,20}$",
        **({"description": description} if description else {}),
    }


def one_of(*values: Any) -> Schema:
    return (
        {"type": "string", "enum": list(values)} if all(isinstance(v, str) for v in values) else {"enum": list(values)}
    )


def whole(low: int = 0, high: int = 1000) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def amount(high: float = 10000, step: float | None = 0.01) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": high, **({"multipleOf": step} if step else {})}


def flag(**more: Any) -> Schema:
    return {"type": "boolean", **more}


def of_format(form: str) -> Schema:
    return {"type": "string", "format": form}


def several(items: Any, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(properties: Schema, *required: str, closed: bool = True, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        **(
            {"additionalProperties": False}
            if closed
            else {"maxProperties": len(set(required))}
            if not properties
            else {}
        ),
        **more,
    }


def mapping(values: Any, most: int = 3, keys: str | None = None) -> Schema:
    if keys:
        return {
            "type": "object",
            "patternProperties": {keys: values},
            "additionalProperties": False,
            "maxProperties": most,
        }
    return {"type": "object", "additionalProperties": values, "maxProperties": most}


def nullable(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def ref(target: str) -> Schema:
    return {"$ref": f"#/$defs/{target}"}


FORMATS = ("date", "date-time", "time", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "duration", "json-pointer")

WORDS = (
    "status", "owner", "region", "label", "title", "count", "price", "limit", "offset", "source", "target", "version",
    "path", "mode", "level", "score", "weight", "height", "width", "color", "language", "timezone", "currency", "token",
    "created", "updated", "expires", "retries", "timeout", "enabled", "visible", "archived", "verified", "priority",
)  # fmt: skip


def some_field(chance: random.Random) -> Schema:
    """A plain field, by chance."""
    makers = (
        lambda: text(chance.choice((8, 16, 32, 64))),
        lambda: text(20, minLength=chance.randint(1, 5)),
        name,
        lambda: whole(chance.choice((-90, 0, 1)), chance.choice((9, 255, 65535))),
        lambda: amount(chance.choice((1, 100, 99999))),
        lambda: amount(5, None),
        flag,
        lambda: of_format(chance.choice(FORMATS)),
        lambda: one_of(*chance.sample(WORDS, 4)),
        lambda: one_of(1, 2.5, "auto", None, True),
        lambda: {"const": chance.choice(WORDS)},
        lambda: {
            "type": "string",
            "pattern": chance.choice((r"^\d{3}-\d{4}$", "^#[0-9a-f]{6}$", r"^v\d+\.\d+\.\d+$", "^[A-Z]{2,5}$")),
        },
        lambda: nullable(whole()),
        lambda: several(one_of("a", "b", "c"), 0, 4),
        lambda: {"type": ["string", "integer"], "maxLength": 12, "minimum": 0, "maximum": 99},
    )
    schema: Schema = chance.choice(makers)()
    if chance.random() < 0.4:
        schema = {
            "title": chance.choice(WORDS).title(),
            "description": f"The {chance.choice(WORDS)} of this object.",
            **schema,
        }
    return schema


def some_record(chance: random.Random, size: int, depth: int) -> Schema:
    """An object with fields by chance, objects among them down to a depth."""
    properties: Schema = {}
    for word in chance.sample(WORDS, min(size, len(WORDS))):
        kind = chance.random()
        if depth and kind < 0.2:
            properties[word] = some_record(chance, max(2, size // 2), depth - 1)
        elif depth and kind < 0.35:
            properties[word] = several(some_record(chance, max(2, size // 3), depth - 1), 0, 2)
        else:
            properties[word] = some_field(chance)
    required = [word for word in properties if chance.random() < 0.6]
    return record(properties, *required)
