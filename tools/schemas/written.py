"""Schemas written by hand: small ones, and those with a keyword that the families do not have."""

from __future__ import annotations

from typing import Any

WRITTEN: dict[str, Any] = {
    "yes-or-no": {"type": "boolean"},
    "rating": {"enum": [1, 2, 3, 4, 5]},
    "anything-small": {"type": ["integer", "boolean", "null"], "minimum": -5, "maximum": 5},
    "list-of-lists": {
        "type": "array",
        "maxItems": 3,
        "items": {"type": "array", "maxItems": 3, "items": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
    "pair": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 5}, {"type": "integer", "maximum": 9, "minimum": 0}],
        "items": False,
    },
    "old-tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "boolean"}, {"const": "x"}],
        "additionalItems": False,
    },
    "old-bounds": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 9,
    },
    "at-least-one": {
        "type": "object",
        "properties": {
            "email": {"type": "string", "format": "email"},
            "phone": {"type": "string", "pattern": "^[0-9]{4,8}$"},
        },
        "additionalProperties": False,
        "minProperties": 1,
    },
    "either-required": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}, "b": {"type": "boolean"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "one-of-types": {
        "oneOf": [
            {"type": "string", "maxLength": 4},
            {"type": "integer", "minimum": 0, "maximum": 9},
            {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        ]
    },
    "narrowed": {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 30}, {"multipleOf": 3}, {"multipleOf": 2}]},
    "anchors": {"$ref": "#word", "$defs": {"w": {"$anchor": "word", "type": "string", "pattern": "^[a-z]{1,6}$"}}},
    "mutual": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "additionalProperties": False},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2},
        },
    },
    "unicode": {
        "type": "object",
        "properties": {
            "größe": {"type": "integer", "minimum": 1, "maximum": 60},
            "naïve ü": {"enum": ["é", "日本", "😀"]},
        },
        "required": ["größe", "naïve ü"],
        "additionalProperties": False,
    },
    "escapes": {
        "type": "object",
        "properties": {'a"b\\c/d': {"const": 'x"\\/\n\t'}},
        "required": ['a"b\\c/d'],
        "additionalProperties": False,
    },
    "decimal": {
        "type": "object",
        "properties": {
            "price": {
                "anyOf": [
                    {"type": "number", "minimum": 0, "maximum": 9},
                    {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "maxLength": 8},
                ]
            }
        },
        "required": ["price"],
        "additionalProperties": False,
    },
    "closed-later": {"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False},
    "money": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 100, "multipleOf": 0.05},
}
