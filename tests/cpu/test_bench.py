"""The benchmarks run, and their results have the format that tools/performance and others read."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headrace.attention.plan import build
from headrace.bench import connections, engine, limits
from headrace.bench.attention_cases import QUICK, AttentionCases, predicted
from headrace.bench.attention_testbed import (
    GQA,
    MHA,
    AttentionTestbed,
    chunk_first,
    decode_spans,
    pairs,
    private,
    shared,
    slots_of,
    unmerged,
)  # fmt: skip
from headrace.bench.benchmark import Benchmark, Case
from headrace.bench.cache import bookkeeping_case
from headrace.bench.contender_process import ContenderFailed, ContenderProcess, process_tree
from headrace.bench.peers import ENGINES, Contender
from headrace.bench.protocol import figures
from headrace.bench.result import measure
from headrace.bench.score import ScoreBench
from headrace.bench.shapes import SHAPES, CheckpointShape
from headrace.bench.workloads import WORKLOADS, chosen
from headrace.cli.main import app
from headrace.types import CHUNK
from tests.support.fake_server import serving

pytestmark = pytest.mark.cpu

ATTENTION = {"name", "ours_ms", "sdpa_ms", "unshared_ms", "gbps", "gflops", "of_bandwidth", "of_gemm"}
ENGINE = {"workload", "model", "engine", "precision", "ttft_s", "decode_tok_s", "wall_s", "peak_rss_mb"}
TINY = CheckpointShape(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, mlp=64)


@pytest.mark.parametrize("faster", [torch.bfloat16, torch.float32])
def test_torch_multiplies_in_its_faster_type(faster: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(runs: dict[str, limits.TimedCall], repeats: int) -> dict[str, float]:
        return {name: 1.0 if name == str(faster) else 2.0 for name in runs}

    monkeypatch.setattr(limits, "alternate", times)
    assert limits.product_type() == faster


@pytest.mark.parametrize(
    "chosen", ["decode_gqa_1x", "decode_gqa_1x256_kv8", "decode_shared_tree_gqa", "prefill_h64_64_on", "linear_4"]
)
def test_attention_writes_the_fixed_format(chosen: str, tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    arguments = ["bench", "attention", "--quick", "--threads", "1", "--cases", chosen, "--json", str(file)]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    result = json.loads(file.read_text())
    assert set(result) == {"date", "machine", "command", "quick", "quick_lengths", "cases"}
    assert answer.stdout.startswith(
        "quick run: lengths of 64, 64, 128 and 256 instead of 1,024, 2,048, 4,096 and 8,192"
    )
    assert {"read_gbps", "gemm_gflops", "gemm_type", "processor", "cores"} <= set(result["machine"])
    assert result["cases"]
    for case in result["cases"]:
        assert set(case) >= ATTENTION and case["name"].startswith(chosen)
        assert case["ours_ms"] > 0 and not any(isinstance(value, list | dict) for value in case.values())


def test_attention_has_every_case() -> None:
    bench = AttentionCases(QUICK, [1, 2])
    families = [name for family in (bench.decode, bench.shared, bench.tree, bench.prefill, bench.linear)
                for name, _ in family()]  # fmt: skip
    assert len(families) == 12 + 10 + 2 + 6 + 6
    assert all(name.startswith(("decode_", "prefill_", "linear_")) for name in families)


def test_plans_of_the_benchmarks_compute_the_same() -> None:
    """Shared pages met together or once per sequence: one answer, bit for bit."""
    paths = shared([2, 2], [64, 128], 64)
    assert len(paths) == 4 and slots_of(paths) == 1 + 2 * 2 + 4
    testbed = AttentionTestbed(GQA, slots_of(paths), "reference")
    plan = build(decode_spans(paths, 256))
    torch.manual_seed(1)
    together = testbed.attend(plan)()
    torch.manual_seed(1)
    assert torch.equal(together, testbed.attend(unmerged(paths, 256))()) and together.abs().max() > 0
    assert pairs(plan) == 4 * 256
    assert pairs(chunk_first(plan)) == 4 * 192


def test_prediction_follows_bytes_then_operations() -> None:
    """Alone, a chunk costs its bytes; shared by many at a slow matrix product, its operations."""
    alone = build(decode_spans(private(4, 256), 256))
    one = build(decode_spans(shared([4], [192], CHUNK), 256))
    fast, slow = 1e18, 1.0
    assert predicted(alone, MHA, 1.0, fast) == pytest.approx(16 * CHUNK * MHA.token_bytes)
    assert predicted(one, MHA, 1.0, fast) == pytest.approx(7 * CHUNK * MHA.token_bytes)
    assert predicted(one, MHA, fast, slow) == pytest.approx(predicted(alone, MHA, fast, slow))


def test_figures_of_a_run() -> None:
    times = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
    assert figures(times, 0.5, overall=False) == {"ttft_s": 1.5, "decode_tok_s": 1.5, "prime_s": 0.5, "wall_s": 4.5}
    assert figures(times, 0.0, overall=True)["decode_tok_s"] == 1.5
    assert figures([[1.0]], 0.0, overall=False)["decode_tok_s"] is None


def test_workloads_are_seeded_and_new_in_each_repetition() -> None:
    assert [w.name for w in chosen(["W1_512", "W4"])] == ["W1_512", "W4"]
    with pytest.raises(ValueError, match="W7"):
        chosen(["W8"])
    for workload in WORKLOADS:
        first, again, other = workload.draw(0, 32), workload.draw(0, 32), workload.draw(1, 32)
        assert first == again and first.prompts != other.prompts
        assert list(map(len, first.prompts)) == list(map(len, other.prompts))
        assert len(first.prompts) == len(first.max_tokens)
    tree = chosen(["W4"])[0].make(random.Random(0), 1).prompts
    assert len(tree) == 32 and tree[0][:4096] == tree[7][:4096] != tree[8][:4096]
    (turn,) = chosen(["W6"])
    first, second = turn.draw(0, 1).prime, turn.draw(0, 1).prompts[0]
    assert len(first) == 8192 and second[:8192] == first and len(second) == 8256
    question = chosen(["W7_1000"])[0].draw(0, 1)
    assert [len(question.prime), *map(len, question.prompts)] == [1020, 1020]
    assert question.prime[:1000] == question.prompts[0][:1000] and question.prime[1000:] != question.prompts[0][1000:]
    assert tree[0][:1024] == tree[31][:1024] and np.ptp([len(p) for p in tree]) == 0


def test_engine_writes_the_fixed_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours in a process of its own; a peer that is not there is a case with its reason."""
    monkeypatch.setitem(SHAPES, "S1", TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "engine.json"
    arguments = ["bench", "engine", "--quick", "--workloads", "W3_2048", "--engine", "headrace,llama.cpp"]
    answer = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert answer.exit_code == 0, answer.output
    cases = json.loads(file.read_text())["cases"]
    assert all(set(case) >= ENGINE for case in cases)
    ours, theirs = (next(case for case in cases if case["engine"] == name) for name in ("headrace", "llama.cpp"))
    assert (tmp_path / "cache" / "bench" / "S1" / "config.json").is_file() and "cache/bench/S1, once" in answer.stderr
    assert json.loads(file.read_text())["quick_lengths"] == {"2112": 66} and ours["longest_prompt"] == 66
    assert ours["ttft_s"] > 0 and ours["decode_tok_s"] > 0 and ours["peak_rss_mb"] > 50
    assert theirs["ttft_s"] is None and "tools/bench_peers" in theirs["error"]


def test_engine_refuses_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.Limits, "figures", lambda *_: {})  # the machine need not be measured for that
    for arguments in (["--engine", "nobody"], ["--models", "S9"], ["--workloads", "W0"]):
        answer = CliRunner().invoke(app, ["bench", "engine", "--quick", *arguments])
        assert answer.exit_code != 0 and arguments[1] in answer.output


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ContenderFailed):
        ContenderProcess(ENGINES["headrace"], tmp_path)


def test_sigterm_interrupts_and_what_there_is_is_written(tmp_path: Path) -> None:
    class Interrupted(Benchmark):
        def cases(self) -> Iterator[Case]:
            yield {"first": 1}
            os.kill(os.getpid(), signal.SIGTERM)
            yield {"second": 2}

    before, path = signal.getsignal(signal.SIGTERM), tmp_path / "result.json"
    with pytest.raises(KeyboardInterrupt):
        measure(Interrupted(), path)
    assert json.loads(path.read_text())["cases"] == [{"first": 1}]
    assert signal.getsignal(signal.SIGTERM) is before


class Silent(Contender):
    """An engine that is ready, and then has a child, and never answers."""

    def command(self) -> list[str]:
        child = "import subprocess, sys; child = subprocess.Popen(['sleep', '600'])"
        return [sys.executable, "-c", f"{child}; print('{{}}', flush=True); child.wait()"]


@pytest.mark.parametrize("while_starting", [True, False])
def test_interrupted_engines_and_their_children_end(
    while_starting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pids: list[int] = []
    ready = ContenderProcess._answer

    def start(process: ContenderProcess) -> dict[str, Any]:
        answer = ready(process)
        pids.extend(process_tree(process.popen.pid))
        if while_starting and len(pids) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return answer

    def ask(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ContenderProcess, "_answer", start)
    monkeypatch.setattr(ContenderProcess, "ask", ask)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    engines: list[Contender] = [Silent("one", "bf16"), Silent("other", "bf16")]
    with pytest.raises(KeyboardInterrupt):
        list(engine._family(chosen(["W1_512"]), "S1", tmp_path, engines, repeats=1, scale=32))
    assert len(pids) == 4
    while any(alive(pid) for pid in pids):  # the test's own limit ends what does not
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs: one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_attention_cases_by_commas() -> None:
    bench = AttentionCases(QUICK, [1])
    names = [case["name"] for case in bench.cases("prefill_gqa_, decode_mha_1x")]
    assert {name.split("_")[0] for name in names} == {"prefill", "decode"}
    assert all(name.startswith(("prefill_gqa_", "decode_mha_1x")) for name in names)
    with pytest.raises(ValueError, match="no case begins so"):
        list(bench.cases("nothing_"))


def test_bookkeeping_is_looked_for_where_it_is_done() -> None:
    """The case itself asserts that scheduling, planning and committing were all met."""
    case = bookkeeping_case("tiny", steps=2)
    assert 0 < case["bookkeeping_ms"] < case["step_ms"]


@contextmanager
def serving_fake(log: Path) -> Iterator[tuple[int, int, Path]]:
    """In this process, which is then taken for the server's."""
    log.touch()
    with serving(api_key=connections.KEY, served_model_name="tiny") as running:
        yield running.port, os.getpid(), log


@pytest.mark.parametrize("fake", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_connections_are_measured_with_and_without_strangers(
    fake: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fake:
        monkeypatch.setattr(connections, "serving", lambda: serving_fake(tmp_path / "log"))
    *rounds, silent, again = connections.ConnectionsBench(idle=40, clients=2, each=2, repeats=1).cases()
    assert [case["name"] for case in rounds] == ["none", "silent", "again"]
    assert all(case["requests"] == 4 and case["p99_ttft_ms"] > 0 for case in rounds)
    assert silent["p99_ttft_ratio"] > 0 and again["p99_ttft_ratio"] > 0


def test_scores_are_measured_and_compared() -> None:
    aligned, ragged = ScoreBench("tiny", texts=(128, 100), options=3, tokens=4, repeats=1).cases()
    assert aligned["same_bits"] and ragged["same_bits"] and aligned["goal"] == 1.15 and ragged["goal"] is None
    assert aligned["ratio"] > 0 and len(aligned["score_times"]) == 1
