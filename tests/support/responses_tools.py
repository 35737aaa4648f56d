"""Tools that requests to /v1/responses have: a function, and some in a namespace."""

from __future__ import annotations

ADD = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [ADD, {**ADD, "name": "_sub"}]}
