"""`$ref` within one document: JSON pointers and anchors. Nothing is fetched."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from headrace.engine.structured.keywords import Refused, below

_DATA = ("const", "enum", "default", "examples")


class References:
    """The places of a document that references name."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.base = ""
        if isinstance(root, dict):
            self.base = str(root.get("$id") or root.get("id") or "").partition("#")[0]
        self._anchors: dict[str, list[str]] | None = None

    def resolve(self, reference: Any, pointer: str) -> str:
        """The canonical pointer (`#/...`) of what a `$ref` at this pointer names. Raises Refused."""
        if not isinstance(reference, str):
            raise Refused(pointer, "$ref must be a text")
        uri, _, fragment = reference.partition("#")
        if uri and uri != self.base:
            raise Refused(
                pointer,
                f"$ref to another document: {reference[:100]!r}",
                "copy it into $defs and refer to #/$defs/NAME",
            )
        if fragment and not fragment.startswith("/"):
            return self._anchor(fragment, pointer)
        if not fragment:
            return "#"
        names = [unquote(name).replace("~1", "/").replace("~0", "~") for name in fragment[1:].split("/")]
        return below("#", *names)

    def at(self, target: str, pointer: str) -> Any:
        """The schema that a canonical pointer names. Raises Refused where there is none."""
        found = self.root
        for name in target.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if found is not self.root and isinstance(found, dict) and isinstance(found.get("$id"), str):
                raise Refused(pointer, f"$ref into a schema that has its own $id: {target[:100]}", "leave out that $id")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise Refused(pointer, f"$ref to what is not there: {target[:100]}") from None
        return found

    def _anchor(self, name: str, pointer: str) -> str:
        if self._anchors is None:
            self._anchors = _anchors(self.root)
        found = self._anchors.get(name, [])
        if len(found) != 1:
            raise Refused(pointer, f"$ref to the anchor {name[:100]!r}, of which there are {len(found)}")
        return found[0]


def _anchors(root: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    waiting: list[tuple[str, Any]] = [("#", root)]
    while waiting:
        pointer, part = waiting.pop()
        if isinstance(part, list):
            waiting += [(below(pointer, number), item) for number, item in enumerate(part)]
        elif isinstance(part, dict):
            own = {part.get("$anchor"), part.get("$dynamicAnchor")} if _plain(part) else set()
            own |= {str(part[key])[1:] for key in ("$id", "id") if str(part.get(key, "")).startswith("#")}
            for name in own - {None}:
                found.setdefault(str(name), []).append(pointer)
            waiting += [(below(pointer, name), item) for name, item in part.items() if name not in _DATA]
    return found


def _plain(part: dict[str, Any]) -> bool:
    return all(isinstance(part.get(key, ""), str) for key in ("$anchor", "$dynamicAnchor"))
