"""Chat templates made of pieces that loop, double, recurse and reach for what the sandbox keeps back."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from headrace.engine import template_worker
from headrace.engine.templates import PROCESSES, Renderer
from headrace.types import InvalidRequest
from tools.fuzz.doors import Door
from tools.fuzz.mutate import TEXTS, damaged, odd

PIECES = [
    "{{ messages }}", "{{ messages[0].content }}", "{{ messages | tojson(indent=9) }}", "{{ tools }}", "{{ value }}",
    "{% for m in messages %}", "{% endfor %}", "{% for i in range(99999) %}", "{% if value %}", "{% endif %}",
    "{% else %}", "{% set n = namespace(s='xy') %}", "{% set n.s = n.s + n.s %}", "{% set n.s = n.s * 99999 %}",
    "{{ n.s }}", "{{ 9 ** 9 ** 9 }}", "{{ 'x' * 10 ** 9 }}", "{{ [0] * 10 ** 8 }}", "{{ range(10 ** 12) | list }}",
    "{{ '%999999999d' % 1 }}", "{{ '{:>999999999}'.format(1) }}", "{{ value.__class__.__mro__ }}",
    "{{ ''.join.__globals__ }}", "{{ cycler.__init__.__globals__.os }}", "{{ lipsum() }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}", "{{ f(1) }}", "{{ raise_exception(value) }}", "{% break %}",
    "{{ strftime_now('%Y' * 99999) }}", "{% generation %}", "{% endgeneration %}", "{% include '/etc/passwd' %}",
    "{{ ''.encode().hex() }}", "{{ messages | map(attribute='content') | sort | groupby(0) | list }}",
    "{{ 'a' | center(10 ** 9) }}", "{{ 'ab' | replace('', 'x' * 99999) | replace('x', 'y' * 99999) }}", "{%", "}}",
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "x"}]


def door() -> Door:
    return Templates()


class Templates:
    memory_mib = PROCESSES * (template_worker.MEMORY_BYTES >> 20) + 256
    case_s = 60.0

    def open(self, folder: Path) -> None:
        self._renderer = Renderer()
        self._check()

    def case(self, rng: Random) -> str:
        template = "".join(rng.choices([*PIECES, "a "], k=rng.choice((1, 2, 4, 8, 16))))
        if rng.random() < 0.3:
            template = damaged(template.encode(), rng).decode(errors="replace")
        message: dict[str, Any] = {"role": rng.choice(TEXTS), "content": rng.choice(TEXTS)}
        if rng.random() < 0.2:
            message["extra"] = odd(rng)
        try:
            text = self._renderer.render(template, [message], None, rng.random() < 0.5, {"value": odd(rng)})
            assert len(text.encode(errors="surrogatepass")) <= template_worker.MAX_OUTPUT
            told = "rendered"
        except InvalidRequest as error:
            assert len(str(error)) < 2 * template_worker.MAX_REASON
            told = next(
                (limit for limit in ("processor time", "memory", "wrote", "JSON") if limit in str(error)), "refused"
            )
        self._check()
        return told

    def _check(self) -> None:
        assert self._renderer.render("{{ messages[0].content }}!", MESSAGES, None, True, {}) == "x!"

    def close(self) -> None:
        self._renderer.close()
