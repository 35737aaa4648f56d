"""A client's JSON Schema as one that llguidance enforces to the letter, or the refusal of the part that it cannot.

The library takes a schema's text and says no to most of what it cannot enforce. Not to all: it takes `format: date`
with 29 February of any year, two properties of one name for minProperties: 2, and const beyond 2^53. So a schema is
written anew here (lowered) from the keywords that are known to be enforced, in the forms in which they are; what only
describes is left out, and each definition stands under a name of its own. `docs/schemas.md` lists what becomes of
which keyword.

Whatever a schema may cost is bounded here, before the library sees it: its recursion goes along references, and has no
bound of its own there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.engine.structured.disjoint import disjoint
from headrace.engine.structured.finite import endless
from headrace.engine.structured.keywords import IN_PLACE, REFUSED, Refused, below, draft_of
from headrace.engine.structured.numbers import check_multiples
from headrace.engine.structured.plain import check_data, plain
from headrace.engine.structured.references import References

MAX_PARTS = 10_000
MAX_DEPTH = 200
"""Schemas inside schemas, references followed; the library takes some 5 KiB of a thread's stack for each."""

MAX_NESTED = 40
"""Schemas inside schemas, references not followed; the library reads 128 levels of JSON."""

MAX_PATTERNS = 4
"""Expressions for one text: the library multiplies out how each of them may go on, before its limits are looked at."""

MAX_SQUARES = 4_000_000
"""Sum over all objects of (number of properties)²: what the library's rules for their order cost."""

MAX_WORK = 2_000_000
"""Sum over all anyOf, oneOf and enum of cases times size of what stands beside them, which the library copies."""


@dataclass(slots=True)
class Lowered:
    """What is made of a schema. `parts`: by JSON pointer, in the order of the document, for telling faults' places."""

    schema: dict[str, Any]
    definitions: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)

    def whole(self, part: Any = None) -> dict[str, Any]:
        """One part, or the whole, as a document of its own."""
        chosen = self.schema if part is None else part if isinstance(part, dict) else {"allOf": [part]}
        return {**chosen, "$defs": self.definitions} if self.definitions else chosen


def lowered(schema: Any) -> Lowered:
    """The schema as llguidance shall read it. Raises Refused."""
    lowering = _Lowering(schema)
    try:
        root = lowering.lower(schema, "#", "#", 0, 0)
    except RecursionError:
        raise Refused("#", "is nested too deeply", "use fewer levels") from None
    if root is False:
        raise Refused("#", "false is a schema that no answer fits")
    lowering.check()
    definitions = {name.removeprefix("#/$defs/"): part for name, part in lowering.definitions.items()}
    return Lowered(root if isinstance(root, dict) else {}, definitions, lowering.parts)


class _Lowering:
    def __init__(self, root: Any) -> None:
        self.draft = draft_of(root)
        self.references = References(root)
        self.names: dict[str, str] = {}
        self.definitions: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
        self.in_place: dict[str, set[str]] = {}
        self.cases: list[tuple[str, list[Any]]] = []
        self.multiples: list[tuple[str, int | float]] = []
        self.count = self.squares = self.work = 0

    def lower(self, schema: Any, pointer: str, owner: str | None, nested: int, depth: int) -> Any:
        """One schema. `owner`: the target of references whose value is this schema's value, if there is one."""
        self.count += 1
        if self.count > MAX_PARTS:
            raise Refused(pointer, f"the schema has more than {MAX_PARTS:,} parts", "use fewer")
        if nested > MAX_NESTED or depth > MAX_DEPTH:
            most = f"{MAX_NESTED} levels, or {MAX_DEPTH} with those of its references"
            raise Refused(pointer, f"is nested deeper than {most}", "use fewer levels")
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, dict):
            raise Refused(pointer, "must be a schema: an object, true or false")
        self._check_keywords(schema, pointer)
        start = self.count
        found = _Joined()
        written = False
        for keyword in schema:
            if keyword in IN_PLACE:
                self._in_place(found, keyword, schema[keyword], pointer, owner, nested, depth)
            elif not written and (keyword == "properties" or "properties" not in schema):
                written = True
                self._plain(found, schema, pointer, nested, depth)
        self._count_work(found.schema, self.count - start)
        self.parts[pointer] = found.schema
        return found.schema

    def _check_keywords(self, schema: dict[str, Any], pointer: str) -> None:
        for keyword, value in schema.items():
            if keyword in REFUSED and not _idle(keyword, value, schema):
                raise Refused(below(pointer, keyword), f"{keyword} cannot be enforced", REFUSED[keyword])
        if pointer != "#" and (schema.get("$id") or (self.draft == 4 and schema.get("id"))):
            base = str(schema.get("$id") or schema["id"])
            if not base.startswith("#") and ("$ref" in str(schema)):
                raise Refused(below(pointer, "$id"), "a second $id moves what references mean", "leave it out")

    def _in_place(
        self, found: _Joined, keyword: str, value: Any, pointer: str, owner: str | None, nested: int, depth: int
    ) -> None:
        place = below(pointer, keyword)
        if keyword == "$ref":
            found.add(keyword, self._reference(value, place, owner, depth))
        elif keyword == "const":
            check_data(value, place)
            self._count_data(value, place)
            found.add(keyword, value)
        elif not isinstance(value, list) or not value:
            raise Refused(place, "must be a list that is not empty")
        elif keyword == "enum":
            for number, item in enumerate(value):
                check_data(item, below(place, number))
                self._count_data(item, place)
            found.add(keyword, value)
        else:
            parts = [
                self.lower(part, below(place, number), owner, nested + 1, depth + 1)
                for number, part in enumerate(value)
            ]
            if keyword == "oneOf":
                self.cases.append((place, parts))
            found.add("allOf" if keyword == "allOf" else "anyOf", parts)

    def _count_data(self, value: Any, place: str) -> None:
        """What an object or a list of const holds: the library makes a rule of each value in it."""
        rest = [value] if isinstance(value, dict | list) else []
        while rest:
            inner = rest.pop()
            self.count += 1
            if self.count > MAX_PARTS:
                raise Refused(place, f"the schema has more than {MAX_PARTS:,} parts", "use fewer")
            if isinstance(inner, dict | list):
                rest += inner.values() if isinstance(inner, dict) else inner

    def _reference(self, value: Any, place: str, owner: str | None, depth: int) -> str:
        target = self.references.resolve(value, place)
        if owner is not None:
            self.in_place.setdefault(owner, set()).add(target)
        if target not in self.names:
            name = self.names[target] = f"#/$defs/{len(self.names)}"
            schema = self.references.at(target, place)
            self.definitions[name] = None  # its place in the order, before those that it refers to
            self.definitions[name] = self.lower(schema, target, target, 0, depth + 1)
        return self.names[target]

    def _plain(self, found: _Joined, schema: dict[str, Any], pointer: str, nested: int, depth: int) -> None:
        def inner(part: Any, *names: str | int) -> Any:
            return self.lower(part, below(pointer, *names), None, nested + 1, depth + 1)

        made, extra = plain(schema, pointer, self.draft, inner)
        names = len(made.get("properties", ())) + len(made.get("required", ()))
        # At least or at most one of n properties becomes n rules of n properties.
        self.squares += names**2 * (100 if {"minProperties", "maxProperties"} & made.keys() else 1)
        if self.squares > MAX_SQUARES:
            raise Refused(pointer, "too many properties", "use fewer")
        if "multipleOf" in made:
            self.multiples.append((below(pointer, "multipleOf"), schema["multipleOf"]))
        if made:
            found.schema.update(made)
        for part in extra:
            found.add("allOf", [part])

    def _count_work(self, made: dict[str, Any], size: int) -> None:
        size += len(made.get("properties", ())) + len(made.get("required", ()))
        self.work += (
            (len(made.get("anyOf", ())) + len(made.get("enum", ()))) * size * bool(made.keys() - {"anyOf", "enum"})
        )
        if self.work > MAX_WORK:
            raise Refused("#", "too many cases beside too many properties", "use fewer")

    def _check_patterns(self) -> None:
        known: dict[int, int] = {}
        for pointer, part in self.parts.items():
            if _patterns(part, self.definitions, known) > MAX_PATTERNS:
                raise Refused(pointer, f"one text has to match more than {MAX_PATTERNS} patterns", "write one pattern")

    def check(self) -> None:
        """What needs all definitions. Raises Refused."""
        check_multiples(self.multiples, any(map(_joins, self.parts.values())))
        _check_cycles(self.in_place)
        never = endless(self.definitions)
        for target, name in self.names.items():
            if name in never:
                told = "each value of it holds another of its kind, so no answer ends"
                raise Refused(target, told, "take that one out of required, or allow null beside it")
        self._check_patterns()
        for place, cases in self.cases:
            if not disjoint(cases, self.definitions, self.draft):
                remedy = "write anyOf, or give each case a required property with a const of its own"
                raise Refused(place, "cases of oneOf that may fit one value cannot be enforced", remedy)


def _joins(part: Any) -> bool:
    """Whether a value of this lowered schema may have to fit another one too."""
    if not isinstance(part, dict):
        return False
    beside = len(part) > 1 and bool({"$ref", "anyOf"} & part.keys())
    return beside or "allOf" in part or {"properties", "patternProperties"} <= part.keys()


def _patterns(schema: Any, definitions: dict[str, Any], known: dict[int, int]) -> int:
    """Expressions that one text has to match at most."""
    if not isinstance(schema, dict):
        return 0
    if id(schema) not in known:
        known[id(schema)] = 0

        def of(part: Any) -> int:
            return _patterns(part, definitions, known)

        own = ("pattern" in schema) + ("format" in schema) + of(definitions.get(schema.get("$ref", "")))
        known[id(schema)] = (
            own + sum(map(of, schema.get("allOf", ()))) + max(map(of, schema.get("anyOf", ())), default=0)
        )
    return known[id(schema)]


class _Joined:
    """A lowered schema that grows; a keyword that comes twice goes on in allOf."""

    def __init__(self) -> None:
        self.schema: dict[str, Any] = {}

    def add(self, keyword: str, value: Any) -> None:
        if keyword == "allOf":
            self.schema.setdefault("allOf", []).extend(value)
        elif keyword in self.schema:
            self.schema.setdefault("allOf", []).append({keyword: value})
        else:
            self.schema[keyword] = value


def _idle(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a keyword that cannot be enforced asks nothing here, or becomes another one (see plain.py)."""
    if keyword == "if":
        return "then" not in schema and "else" not in schema
    if keyword == "uniqueItems":
        most = schema.get("maxItems")
        return not value or (isinstance(most, int) and most <= 1)
    if keyword in ("unevaluatedProperties", "unevaluatedItems"):
        return value is True or value == {} or not any(name in schema for name in IN_PLACE)
    if keyword == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    return keyword in ("dependencies", "dependentRequired", "dependentSchemas") and value == {}


def _check_cycles(edges: dict[str, set[str]]) -> None:
    """Raises Refused for a reference that leads to itself with no property or item between."""
    done: set[str] = set()
    for start in edges:
        path: list[tuple[str, list[str]]] = [(start, list(edges[start]))]
        open_ = {start}
        while path:
            node, rest = path[-1]
            if not rest:
                done.add(node)
                open_.discard(node)
                path.pop()
                continue
            target = rest.pop()
            if target in open_:
                raise Refused(target, "refers to itself with no property or item between")
            if target not in done:
                open_.add(target)
                path.append((target, list(edges.get(target, ()))))
