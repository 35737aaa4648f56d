"""The measuring commands on the tiny model and two ranks: what they write, go on with, and refuse."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from headrace import LLM, SamplingParams
from headrace.bench.prefill_grid import prefill_config
from headrace.bench.prefill_links import Namespaces, RankLink
from headrace.bench.prefill_testbed import PrefillTestbed, open_testbed
from headrace.cli.main import app
from headrace.config import EngineConfig
from headrace.planner.schedule import Shards
from headrace.planner.tuned_table import TunedTable, load_table
from headrace.strategies import OFFERED

CASE = {
    "strategy", "ranks", "tokens", "cached", "bandwidth_gbps", "ttft_s", "partition", "wait_s", "bytes_sent", "ttfts",
}  # fmt: skip


@contextmanager
def one_testbed(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of `tune` meanwhile share one testbed, so that ranks start once: their settings must be the same."""
    testbeds: list[PrefillTestbed] = []
    with ExitStack() as stack:

        @contextmanager
        def open_once(config: EngineConfig, **options: Any) -> Iterator[PrefillTestbed]:
            if not testbeds:
                testbeds.append(stack.enter_context(open_testbed(config, **options)))
            assert config.replace(threads=testbeds[0].config.model.threads) == testbeds[0].config
            yield testbeds[0]

        patch.setattr("headrace.bench.tune.open_testbed", open_once)
        yield
        patch.setattr("headrace.bench.tune.open_testbed", open_testbed)


def invoke(*arguments: object, code: int = 0) -> str:
    answer = CliRunner().invoke(app, [str(each) for each in arguments])
    assert answer.exit_code == code, answer.output
    return answer.output


@pytest.mark.matrix
def test_prefill_writes_the_fixed_format_and_a_plot(tmp_path: Path) -> None:
    file, picture = tmp_path / "prefill.json", tmp_path / "prefill.png"
    strategies = "single,gather,gather-full,chain-even,chain,chain-searched,ring-kv,ring-q"
    told = invoke(
        "bench", "prefill", "tiny", "--json", file, "--tokens", "256", "--cached", "0,128", "--bandwidth", "none,0.05",
        "--strategies", strategies, "--repeats", 2, "--search-repeats", 1, "--plot", picture,
    )  # fmt: skip
    result = json.loads(file.read_text())
    cases = result["cases"]
    assert set(result) >= {"machine", "cases"} and len(cases) == 8 * 4
    assert result["machine"]["profile_2_ranks"]["link_bytes_s"] > 0
    for case in cases:
        ranks = case["ranks"]
        assert set(case) == CASE
        assert len(case["wait_s"]) == len(case["bytes_sent"]) == ranks and len(case["ttfts"]) == 2
        assert case["partition"][0] == case["cached"] and case["partition"][-1] == case["cached"] + 256
        assert min(case["ttfts"]) <= case["ttft_s"] <= max(case["ttfts"])
    assert {case["strategy"]: case["ranks"] for case in cases} == {
        name: 1 if name == "single" else 2 for name in strategies.split(",")
    }
    assert {case["bandwidth_gbps"] for case in cases} == {None, 0.05}
    evens = [case["partition"] for case in cases if case["strategy"] == "chain-even"]
    assert evens == [[0, 128, 256], [128, 256, 384]] * 2
    assert "0.05      256     128  " in told and "x)" in told
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.matrix
def test_tune_goes_on_where_it_was_and_its_table_serves_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "table.json"
    tune = ("tune", "tiny", "--out", file, "--tokens", "1024,256", "--repeats", 1, "--heuristic")
    run, seen = PrefillTestbed.run, []

    def interrupted(testbed: PrefillTestbed, strategy: str, cut: Shards, *rest: Any) -> Any:
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(cut.bounds)
        return run(testbed, strategy, cut, *rest)

    monkeypatch.setattr(PrefillTestbed, "run", interrupted)
    invoke(*tune, code=130)
    begun = load_table(file)
    kept = {point.bounds for point in begun.measured[1024]}
    assert len(kept) == 2 and kept == set(seen) and not begun.entries  # the first one ran twice: once to warm up

    searched: list[tuple[int, ...]] = []

    def watched(testbed: PrefillTestbed, strategy: str, cut: Shards, P: int = 0, placement: Any = "own") -> Any:
        if placement == "own":
            searched.append(cut.bounds)
        return run(testbed, strategy, cut, P, placement)

    monkeypatch.setattr(PrefillTestbed, "run", watched)
    monkeypatch.setattr("headrace.bench.tune.confirmed", lambda _, found, P: (found.best, found.best_s))
    foreign = tmp_path / "foreign.json"
    with one_testbed(monkeypatch):
        told = invoke(*tune)
        table = load_table(file)
        assert not kept & set(searched)
        assert set(table.entries) == {256, 1024} and not table.measured and table.machine == begun.machine
        assert set(table.corrections) == set(OFFERED) and min(table.corrections.values()) > 0
        assert table.heuristic is not None
        assert f"wrote {file}" in told and "h(T, P) = " in told

        searched.clear()
        invoke(*tune)
        assert not searched

        stamp = msgspec.structs.replace(table.stamp, machine="another processor, 1 cores, none")
        TunedTable(stamp=stamp, machine=table.machine, entries=table.entries).save(foreign)
        before = foreign.read_bytes()
        told = invoke("tune", "tiny", "--out", foreign, "--tokens", "1024", code=2)
        assert "does not fit" in told and "another --out" in told
        assert foreign.read_bytes() == before
    monkeypatch.undo()
    _serves(file, foreign)


def _serves(file: Path, foreign: Path) -> None:
    """The engine takes the table, and refuses that of another machine."""
    prompt = list(range(3, 303))
    llm = LLM(
        "tiny",
        context_parallel_size=2,
        parallel_table=str(file),
        threads=1,
        prefill_strategy="chain",
        kv_cache_tokens=2048,
    )
    try:
        answer = llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0.0))[0]
        assert answer.metrics is not None and answer.metrics.strategy == "chain"
    finally:
        llm.close()
    with pytest.raises(ValueError, match=r"the tuned table does not fit .machine: tuned for 'another processor"):
        LLM("tiny", context_parallel_size=2, parallel_table=str(foreign), threads=1, kv_cache_tokens=2048)


@pytest.mark.matrix
def test_choice_tells_what_was_picked_and_where_pass_q_wins(tmp_path: Path) -> None:
    file = tmp_path / "choice.json"
    told = invoke(
        "bench", "choice", "tiny", "--json", file, "--tokens", "64,128", "--cached", "0,256", "--bandwidth", "0.05",
        "--repeats", 1, "--against-one-engine",
    )  # fmt: skip
    cases = json.loads(file.read_text())["cases"]
    assert [(case["tokens"], case["cached"]) for case in cases] == [(64, 0), (128, 0), (64, 256), (128, 256)]
    for case in cases:
        measured = case["measured_s"]
        assert set(measured) == set(OFFERED) and case["chosen"] in case["predicted_s"]
        assert case["best"] == min(measured, key=measured.__getitem__)
        assert case["over_best"] == measured[case["chosen"]] / measured[case["best"]] >= 1
        assert case["pass_q_wins"] == (measured["ring-q"] < measured["ring-kv"])
        assert case["tie"] or case["chosen"] != case["best"]
        assert set(case["beside"]) == {"one engine, all cores", "one rank by itself"}
    summed = [line.split() for line in told.splitlines()]
    assert ["2", "0.05", "256"] in [words[:3] for words in summed]
    assert ["2", "128", "256", "one", "engine,"] in [words[:5] for words in summed]


@pytest.mark.matrix
def test_network_namespaces_limit_the_link_and_are_removed() -> None:
    try:
        Namespaces(2).close()
    except ValueError as error:
        pytest.skip(str(error))
    with open_testbed(prefill_config("tiny", 2, 2048, 1), netns=True) as testbed:
        testbed.set_link(RankLink(0.01))
        run = testbed.run("chain", Shards((0, 1536, 2048), (0, 1)))
        # A burst passes at once, and another one each time that the link was idle for as long: before each layer.
        assert run.seconds >= (run.bytes_sent[0] - 4 * (128 << 10)) / 0.01e9
        with pytest.raises(ValueError, match="jitter need --link limited"):
            testbed.set_link(RankLink(0.01, jitter=0.5))
        name = testbed._spaces.name  # type: ignore[union-attr]
    assert name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert name not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "prefill", "no-such-folder"), "no folder with a config.json"),
        (("bench", "prefill", "--ranks", "1"), "ranks must be one or more integers of at least 2"),
        (("bench", "prefill", "--tokens", "1q"), "tokens must be a number of tokens"),
        (("bench", "prefill", "--tokens", "0"), "tokens must be one or more integers of at least 1"),
        (("bench", "prefill", "--cached", "100"), "cached must be multiples of 64"),
        (("bench", "prefill", "--tokens", "16384", "--cached", "64"), "the model's context is 16384: ask for less"),
        (("bench", "prefill", "--strategies", "single,rings"), "strategies must be some of single, gather"),
        (("bench", "prefill", "--bandwidth", "fast"), "bandwidth must be GB/s by commas, or 'none', got 'fast'"),
        (("bench", "prefill", "--bandwidth", "0"), "bandwidth must be above 0"),
        (("bench", "prefill", "--jitter", "1"), "jitter must be in [0, 1), got 1.0"),
        (("bench", "prefill", "--latency-ms", "-1"), "latency-ms must be from 0"),
        (("bench", "prefill", "--link", "wire"), "link must be one of limited, netns, got 'wire'"),
        (("bench", "prefill", "--placement", "here"), "placement must be one of own, round, last"),
        (("bench", "prefill", "--table", "no-such.json"), "no usable tuned table in no-such.json"),
        (("bench", "prefill", "--dtype", "float8"), "dtype must be one of auto"),
        (("bench", "choice", "--rule", "dice"), "rule must be one of cost, alg1"),
        (("tune", "tiny", "--out", "x.json", "-cp", "1"), "ranks must be at least 2, got 1"),
        (("tune", "tiny", "--out", "x.json", "--tokens", "64"), "tokens must be at least 128 for 2 ranks"),
        (("tune", "tiny", "--out", "x.json", "--stride", "0"), "stride must be at least 1"),
        (("tune", "tiny", "--out", "x.json", "--bandwidth", "-1"), "bandwidth must be above 0"),
        (("tune", "tiny", "--out", "/tmp"), "out must be a file, /tmp is a folder"),
    ],
)  # fmt: skip
def test_a_bad_option_is_named(arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("no group is opened for a bad option")

    for module in ("prefill_testbed", "tune"):
        monkeypatch.setattr(f"headrace.bench.{module}.open_testbed", started)
    told = invoke(*arguments, code=2)
    assert message in " ".join(told.split())
