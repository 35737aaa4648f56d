"""The table of all benchmarks: whole screens, on a terminal and on a pipe; what is ok and what falls short."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from headrace.bench.attention import AttentionBench
from headrace.bench.attention_goals import goal, judged
from headrace.bench.benchmark import Benchmark, Case
from headrace.bench.cache import CacheBench
from headrace.bench.registry import BENCHMARKS
from headrace.bench.result import quick_text, result
from headrace.bench.table import CaseTable, Column, columns_of, show

pytestmark = pytest.mark.unit

CASES: list[Case] = [
    {"name": "match", "prompt_tokens": 100_000, "median_ms": 13.1824, "limit_ms": 20},
    {"name": "bookkeeping", "shared_tokens": 2048, "step_ms": 1234.5, "bookkeeping_ms": 30.5, "share": 0.0247,
     "limit": 0.02, "limit_ms": 50},
]  # fmt: skip

SCREEN = """\
case           tokens      time        limit  of a step         limit      step
                             ms                       %                      ms
match         100,000     13.18     <= 20.00          -                       -  ok
bookkeeping     2,048     30.50     <= 50.00       2.47       <= 2.00   1,234.5  short
"""


def shown(columns: Any, cases: list[Case], width: int, **how: Any) -> str:
    file = io.StringIO()
    show(columns, cases, Console(file=file, width=width, highlight=False, soft_wrap=True, **how))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_a_pipe_shows_whole_rows_whatever_its_width(width: int) -> None:
    assert shown(CacheBench().columns(), CASES, width) == SCREEN


def test_a_terminal_has_colours_and_no_others_with_no_color() -> None:
    text = shown(CacheBench().columns(), CASES, 120, force_terminal=True, color_system="standard")
    assert "\x1b[32mok" in text and "\x1b[33mshort" in text
    plain = shown(CacheBench().columns(), CASES, 120, force_terminal=True, color_system="standard", no_color=True)
    for code in ("\x1b[1m", "\x1b[2m", "\x1b[0m"):
        plain = plain.replace(code, "")
    assert plain == SCREEN


def test_the_shipped_models_short_steps_have_no_limit() -> None:
    row = shown(CacheBench().columns(), [CASES[1] | {"model": "tiny", "limit": None}], 80).splitlines()[-1]
    assert row.split() == ["bookkeeping", "2,048", "30.50", "<=", "50.00", "2.47", "1,234.5", "ok"]


@pytest.mark.parametrize("kind", BENCHMARKS, ids=lambda kind: kind.name)
def test_what_stays_of_a_table_fits_80_columns(kind: type[Benchmark]) -> None:
    table = CaseTable(kind.columns(kind.__new__(kind)), Console(width=80, force_terminal=True))
    assert table.width <= 80


ATTENTION: Case = {
    "name": "decode_gqa_16x2048", "ours_ms": 1.25, "sdpa_ms": 5.5, "unshared_ms": None, "gbps": 40.0, "gflops": 160.4,
    "of_bandwidth": 0.88, "of_gemm": 0.2, "of_peak": 0.17, "threads": 2, "read_gbps": 45.5, "gemm_gflops": 800.0,
    "peak_gflops": 940.0,
}  # fmt: skip


def test_what_is_optional_is_left_out_of_a_narrow_terminal() -> None:
    columns = AttentionBench().columns()
    narrow = shown(columns, [ATTENTION], 80, force_terminal=True, color_system=None)
    assert all(len(line) <= 80 for line in narrow.splitlines())
    told = ["decode_gqa_16x2048", "1.250", "read", "rate", "0.88", ">=", "0.90", "short"]
    assert narrow.splitlines()[-1].split() == told
    wide = shown(columns, [ATTENTION], 160, force_terminal=True, color_system=None)
    assert wide == shown(columns, [ATTENTION], 80), "a pipe has all columns"
    assert wide.splitlines()[-1].split()[1:8] == ["2", "1.250", "5.500", "40.0", "45.5", "160", "800"]


@pytest.mark.parametrize(
    ("name", "of", "least"),
    [
        ("decode_mha_1x8192", ("read rate", 0.88), 0.92), ("decode_gqa_1x8192_kv8", ("read rate", 0.88), None),
        ("decode_shared_mha_2048", ("no sharing", 9.0), 11.0), ("decode_shared_gqa_0", ("no sharing", 9.0), 0.97),
        ("decode_shared_gqa_2048_chunk_first", ("peak", 0.17), 0.80),
        ("decode_shared_tree_gqa", ("predicted", 0.95), 0.90), ("prefill_mha_8192", ("GEMM", 0.2), 0.88),
        ("prefill_h64_8192", ("GEMM", 0.2), 0.80), ("prefill_mha_512_on_8192", ("GEMM", 0.2), 0.80),
        ("linear_4x4096x11008", ("read rate", 0.88), 0.95), ("linear_16x4096x11008", ("read rate", 0.88), 0.85),
        ("linear_64x4096x11008", ("torch", 1.2), 1.0), ("linear_64x4096x11008_int8", ("torch", 1.2), None),
    ],
)  # fmt: skip
def test_each_attention_case_is_judged_by_its_own_share(name: str, of: tuple[str, float], least: float | None) -> None:
    case = ATTENTION | {"name": name, "gain": 9.0, "of_model": 0.95, "torch_ms": 1.5}
    assert judged(case) == of and goal(case) == least


def test_one_core_is_asked_for_less() -> None:
    assert goal(ATTENTION | {"threads": 1}) == 0.80 and goal(ATTENTION) == 0.90


def test_limits_of_both_kinds() -> None:
    most, least = Column("x", form=".1f", limit=2, bound="at most"), Column("x", form=".1f", limit="goal")
    assert [most.kept({"x": value}) for value in (1, 2, 3, None)] == [True, True, False, None]
    assert [least.kept({"x": value, "goal": 2}) for value in (1, 2, 3)] == [False, True, True]
    assert least.kept({"x": 1}) is None and least.limit_text({"x": 1}) == ""
    assert (most.limit_text({}), least.limit_text({"goal": 5})) == ("<= 2.0", ">= 5.0")


def test_a_benchmark_without_columns_shows_its_first_cases_names() -> None:
    case = {"model": "tiny", "tokens": 12345, "same": True, "seconds": 0.25}
    told = ["model    tokens  same   seconds", "tiny     12,345  yes       0.25"]
    assert shown(columns_of(case), [case], 80).splitlines() == told


def test_quick_runs_are_marked() -> None:
    assert quick_text({2048: 64, 8192: 256}) == (
        "quick run: lengths of 64 and 256 instead of 2,048 and 8,192, once each: it shows that all runs, "
        "and measures nothing"
    )
    quick = result([], {}, {2048: 64})
    assert quick["quick"] is True and quick["quick_lengths"] == {2048: 64} and "quick" not in result([], {})


@pytest.mark.parametrize("kind", BENCHMARKS, ids=lambda kind: kind.name)
def test_every_benchmark_declares_its_columns(kind: Any) -> None:
    columns = kind().columns()
    assert columns is not None
    assert any(column.form and column.unit for column in columns) or kind.name == "serve"
