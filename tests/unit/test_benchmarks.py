"""A benchmark is a class of options: what the command line makes of one, and what becomes of its cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headrace.bench.benchmark import Benchmark, Case, integers, one_of, option, options_of
from headrace.bench.registry import BENCHMARKS
from headrace.bench.result import measure
from headrace.cli.bench import JSON, command_of

pytestmark = pytest.mark.unit


@dataclass
class EchoBench(Benchmark):
    """Says what it was given."""

    name = "echo"
    model: str = option("A model.", argument=True)
    sizes: tuple[int, ...] = option("Sizes, by commas.", "1,2", parse=integers, flags=("--of-size",))
    order: str = option("Which first.", "up", parse=one_of("up", "down"))
    repeats: int = option("How often.", 1, min=1)

    def cases(self) -> Iterator[Case]:
        self.machine["speed"] = 7
        for _ in range(self.repeats):
            yield {"model": self.model, "sizes": self.sizes, "order": self.order}


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(command_of(EchoBench, EchoBench.name, measure, JSON))
    return made


def test_options_become_fields_and_cases_a_result(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "echo.json"
    given = ["m", "--of-size", "3,4", "--order", "down", "--repeats", "2", "--json", str(file)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0 and done.output.count("model m  sizes (3, 4)  order down") == 2
    result = json.loads(file.read_text())
    assert result["cases"] == [{"model": "m", "sizes": [3, 4], "order": "down"}] * 2
    assert result["machine"]["speed"] == 7 and set(result) == {"date", "machine", "command", "cases"}
    assert EchoBench("m").sizes == (1, 2), "defaults are parsed too"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "no model: give it first or as -m"),
        (["m", "-m", "n"], "two models"),
        (["m", "--of-size", "1,x"], "sizes must be integers by commas, got '1,x'"),
        (["m", "--order", "sideways"], "order must be one of up, down, got 'sideways'"),
        (["m", "--repeats", "0"], "--repeats"),
    ],
)
def test_what_cannot_be_is_refused(given: list[str], told: str, app: typer.Typer) -> None:
    done = CliRunner().invoke(app, given, env={"TERM": "dumb"})
    assert done.exit_code == 2 and told in done.output


@pytest.mark.parametrize("kind", BENCHMARKS, ids=lambda kind: kind.name)
def test_every_benchmark_says_what_it_is(kind: type[Benchmark]) -> None:
    assert kind.__doc__ and all(each.help.endswith((".", ":")) for each in options_of(kind).values())
    assert [each.name for each in BENCHMARKS].count(kind.name) == 1
    kind()  # by its defaults
