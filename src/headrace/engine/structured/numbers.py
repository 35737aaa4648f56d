"""The keywords for numbers, brought to what the library computes exactly: doubles, and 64-bit integers for integers.

A bound that is no double moves inwards to the next one, so that an answer never passes the bound that was asked for.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from headrace.engine.structured.keywords import Refused, below

BIG = 9223372036854774784
"""The largest double below 2^63; the library computes with 64-bit integers."""

MAX_MULTIPLE = 10_000
"""Of multipleOf, without its decimal point: the library makes a state for each remainder."""

MAX_COMMON = 20_000
"""Of the least common multiple of multipleOf that one number may have to meet, which are as many states."""

NEIGHBOURS = 4
"""Doubles on either side of a multipleOf with decimals, of which the library may read one as it is meant."""

LEAST = 1e-60
"""Of bounds: the library reads the decimals of one as an expression, and expressions no deeper than it likes."""

DIGITS = 14
"""Of a bound that stands for an exclusive one: with all 17 of a double the library would round it to that one."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def numeric(schema: dict[str, Any], pointer: str, integer: bool) -> dict[str, Any]:
    """minimum, maximum, exclusiveMinimum, exclusiveMaximum and multipleOf of a schema. Raises Refused."""
    given = {name: schema[name] for name in BOUNDS if name in schema}
    for name, value in list(given.items()):
        if name.startswith("exclusive") and isinstance(value, bool):  # draft 4: a switch beside the bound
            plain = name.removeprefix("exclusive").lower()
            del given[name]
            if value and plain in given:
                given[name] = given.pop(plain)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if not is_number(value):
            raise Refused(below(pointer, name), "must be a number")
        if 0 < abs(value) < LEAST:
            raise Refused(below(pointer, name), f"has too many decimals: {value}", f"use 0, or at least {LEAST}")
        upper = name.endswith("aximum")
        if abs(value) > BIG:
            if (value > 0) != upper:
                raise Refused(below(pointer, name), "no number of 64 bits is within this bound", "use a smaller one")
            value = BIG if upper else -BIG
        if integer and name.startswith("exclusive"):
            name = name.removeprefix("exclusive").lower()
            value = (math.ceil(value) - 1) if upper else (math.floor(value) + 1)
        elif name.startswith("exclusive") and value == int(value) and abs(value) >= 1 << 53:
            name, value = name.removeprefix("exclusive").lower(), _next_double(value, upper, below(pointer, name))
        elif name.startswith("exclusive") and value == int(value) and _moves(value, given, "multipleOf" in schema):
            near = _next(int(value), upper)
            name, value = (name, value) if near is None else (name.removeprefix("exclusive").lower(), near)
        value = _within(value, upper, integer)
        tightest = min if upper else max
        found[name] = tightest(found[name], value) if name in found else value
    if "multipleOf" in schema:
        found["multipleOf"] = _multiple(schema["multipleOf"], below(pointer, "multipleOf"))
    return found


def _moves(value: int | float, given: dict[str, Any], multiple: bool) -> bool:
    """Whether a whole exclusive bound is to move: beside multipleOf, where its digits cost much, if another is near."""
    return not multiple or any(is_number(other) and 0 < abs(other - value) < 1 for other in given.values())


def _next(value: int, upper: bool) -> float | None:
    """A bound inside an exclusive one that is whole: answers would have that itself where another bound is less than 1
    from it. None: there are no digits left for it."""
    places = DIGITS - len(str(abs(value)))
    if places < 1:
        return None
    return value + (-1 if upper else 1) * 10.0**-places


def _next_double(value: int | float, upper: bool, pointer: str) -> float:
    """The double inside a whole exclusive bound from 2^53 on, which the library would move by 1, and so not at all."""
    near = float(value)
    if near >= value if upper else near <= value:
        near = math.nextafter(near, -math.inf if upper else math.inf)
    if abs(near) > BIG:
        raise Refused(pointer, "no number of 64 bits is within this bound", "use a smaller one")
    return near


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact(value: int | float) -> bool:
    """Whether the library reads this number as itself, also where it is to be an integer."""
    return abs(value) <= BIG and (isinstance(value, float) or int(float(value)) == value)


def _within(value: int | float, upper: bool, integer: bool) -> int | float:
    """The bound itself, or a number inside it that the library reads as itself: for integers it takes the double's own
    value, for other numbers the 17 digits that tell it from its neighbours."""
    if isinstance(value, float) or abs(value) <= 1 << 53:
        return value
    if not integer:
        step = int(10 ** (len(str(abs(value))) - 15))
        return value // step * step if upper else -(-value // step * step)
    near = float(value)
    if (near > value) == upper and near != value:
        near = math.nextafter(near, -math.inf if upper else math.inf)
    return int(near)


def scaled(value: int | float) -> tuple[int, int]:
    """A number as (coefficient, decimal places)."""
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    coefficient = int("".join(map(str, digits)))
    return (coefficient * 10**exponent, 0) if exponent > 0 else (coefficient, -exponent)


def _multiple(value: Any, pointer: str) -> Any:
    if not is_number(value) or not 0 < value < 1e15:
        raise Refused(pointer, "must be a number above 0 and below 10^15")
    coefficient, places = scaled(value)
    if coefficient > MAX_MULTIPLE or places > 8:
        raise Refused(pointer, f"has too many digits: {value}", f"use at most {MAX_MULTIPLE:,}, or 8 decimal places")
    around = [float(value)]
    for _ in range(NEIGHBOURS):
        around = [math.nextafter(around[0], 0.0), *around, math.nextafter(around[-1], math.inf)]
    for near in sorted(around, key=lambda near: abs(near - value)):
        if _read(near) == (coefficient, places):
            return value if near == value else near
    remedy = f"count in smaller units: an integer with multipleOf {coefficient}"
    raise Refused(pointer, f"{value} is no number that can be enforced exactly", remedy)


def _read(value: float) -> tuple[int, int]:
    """A number as the library takes its decimal point away: multiplied by ten until it is whole."""
    places = 0
    while value != int(value) and places < 20:
        value, places = value * 10, places + 1
    return int(value), places


def check_multiples(values: list[tuple[str, int | float]], meet: bool) -> None:
    """Raises Refused if these multipleOf of one schema, each with its pointer, cost too much together, or have a common
    multiple beyond 32 bits, which the library would compute wrongly. meet: whether one number may have several."""
    if meet and math.lcm(*(scaled(value)[0] for _, value in values)) > MAX_COMMON:
        told = (
            f"the least common multiple of all multipleOf is above {MAX_COMMON:,}, where allOf, $ref or cases join them"
        )
        raise Refused(values[-1][0], told, "leave some out, or use smaller ones")
    if sum(scaled(value)[0] for _, value in values) > 10 * MAX_MULTIPLE:
        raise Refused(values[-1][0], "the schema has too many large multipleOf", "leave some out")
    distinct = {scaled(value) for _, value in values}
    places = max((places for _, places in distinct), default=0)
    product = math.prod(coefficient * 10 ** (places - own) for coefficient, own in distinct)
    if len(distinct) > 1 and product >= 1 << 32:
        raise Refused(values[-1][0], "the schema has too many different multipleOf", "leave some out")
