"""Tools in groups: the model calls a function of a namespace by one flat name, clients by two."""

from __future__ import annotations

from collections.abc import Mapping

Split = Mapping[str, tuple[str, str]]
"""Flat name -> namespace and name."""


def flat_name(namespace: str | None, name: str) -> str:
    """mcp__files and read become mcp__files__read."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") or name.startswith("_") else f"{namespace}__{name}"


def named(flat: str, split: Split) -> dict[str, str]:
    """`name` of a call as its client knows it, and `namespace` where it has one."""
    if flat not in split:
        return {"name": flat}
    namespace, name = split[flat]
    return {"name": name, "namespace": namespace}
