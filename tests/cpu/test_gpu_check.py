"""Sections of `make gpu-check` on the CPU, with a small model in place of the large ones: that they run and what they
report. The figures mean nothing here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.attention.plan import build
from headrace.bench.attention_testbed import Heads, decode_spans, shared
from headrace.bench.shapes import CheckpointShape, write_checkpoint, write_outline
from headrace.types import CHUNK
from tests.support.traces import GREEDY
from tools.gpu import (
    bits,
    check,
    chunk_attention,
    device_tests,
    engine,
    latents,
    long_context,
    lookup_model,
    models,
    restores,
    sessions,
    timing,
    warm,
)
from tools.gpu.runner import Case, LeftOut, Row

SMALL = CheckpointShape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=200, context=2048)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sections' device is the CPU."""
    monkeypatch.setattr(timing, "CUDA", CPU)
    monkeypatch.setattr(timing, "read_gbps", lambda: 10.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(models.USUAL, "attention_backend", "auto")
    monkeypatch.setitem(models.USUAL, "kv_cache_tokens", 16_384)
    monkeypatch.setitem(models.MODELS, "S1", SMALL)


def rows_of(case: Case) -> list[Row]:
    found = case.run()
    return [found] if isinstance(found, Row) else list(found)


def test_the_outline_of_a_checkpoint_is_sound(tmp_path: Path) -> None:
    """The files of a shape without its numbers: the same names, sizes and configuration."""
    from safetensors.torch import load_file

    written, outlined = write_checkpoint(SMALL, tmp_path / "written"), write_outline(SMALL, tmp_path / "outlined")
    assert (written / "config.json").read_text() == (outlined / "config.json").read_text()
    numbers, zeros = (load_file(folder / "model.safetensors") for folder in (written, outlined))
    assert {name: x.shape for name, x in numbers.items()} == {name: x.shape for name, x in zeros.items()}
    assert {x.dtype for x in zeros.values()} == {torch.bfloat16}


def test_drawn_weights_are_shared_and_not_the_files(tmp_path: Path) -> None:
    model = models.drawn_model(SMALL, CPU, tmp_path)
    with model.engine() as one, model.engine() as two:
        assert one.engine.loaded.decoder is two.engine.loaded.decoder is model.decoder
        answers = [llm.generate([[11, 12, 13]], SamplingParams(temperature=0.0))[0].token_ids for llm in (one, two)]
        assert answers[0] == answers[1] and len(set(answers[0])) > 1


def test_engine_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case gives a row with a figure for each goal."""
    sizes = engine.Sizes(
        first=(130, 20), contexts=((1, 70), (3, 20)), decoded=8, sharing=3, shared=130, own=10, many=4, answer=24,
        beside=300, slices=64,
    )  # fmt: skip
    monkeypatch.setattr(engine, "device_ms_a_step", lambda llm, prompts, answer: 1.0)
    rows = [row for case in engine.cases_of("S1", 0.8, sizes) for row in rows_of(case)]
    assert len(rows) == 9
    for row in rows:
        assert row.figures and all(isinstance(row.figures[goal.figure], float) for goal in row.goals), row
    figures = {row.name: row.figures for row in rows}
    first = {"ours_ms", "dynamic_ms", "static_ms", "over_best", "replayed_prompts"}
    assert first == set(figures["S1 first token of 130"])
    assert {"ours_tok_s", "of_read", "dynamic_tok_s", "static_tok_s"} <= set(figures["S1 decode 3 x 20"])


@pytest.mark.parametrize("static", [False, True])
def test_a_peer_goes_on_from_what_it_was_primed_with(static: bool) -> None:
    """As many tokens as the whole prompt would give: the cache is that of the prefix."""
    model = models.transformers_model(SMALL, CPU)
    peer = engine.TransformersPeer(model, static=static)
    prompt = torch.tensor([sessions.drawn_tokens(80, SMALL.vocab)])
    with torch.inference_mode():
        whole = model(input_ids=prompt, logits_to_keep=1).logits[:, -1]
        known = peer.primed(prompt[:, :70], 3, 10)
        rows = prompt[:, 70:].repeat(3, 1)
        primed = model(input_ids=rows, logits_to_keep=1, **{peer.cache_name: known}).logits[:, -1]
    assert (primed - whole).abs().max() <= 0.05 * whole.abs().max()
    assert len(peer.run(prompt, 4)[0]) == 4


def test_bits_cases() -> None:
    """Whole engines on the CPU keep the promise, and a schedule with other bits is found."""
    schedules = {"batch", "cached", "eager", "preempted", "prefilled", "buckets", "unshared", "speculated"}
    named, equal = set(), 0
    for case in bits.of_model("tiny", bits.shipped):
        named.add(case.name)
        if case.name in ("tiny batch", "tiny eager"):
            equal += rows_of(case)[0].figures["rows_equal"]
    assert {f"tiny {each}" for each in schedules} | {f"tiny cut at {each}" for each in (64, 96, 1000)} == named
    assert equal == 2 * 16 * (GREEDY.max_tokens or 0)


def test_other_bits_are_a_failure() -> None:
    found = bits.Bits.__new__(bits.Bits)
    found.name, found.truth = "x", [{3: torch.tensor([1.0])}]
    assert found.equal("batch", [{3: torch.tensor([1.0])}]).figures == {"rows_equal": 1}
    with pytest.raises(AssertionError, match="bits differ after position 3"):
        found.equal("batch", [{3: torch.tensor([1.0 + 1e-7])}])


def test_plans_of_chunk_attention() -> None:
    """Both plans have a row for each sequence at the same position, and name the same pages: one once, the other once
    for each sequence."""
    ours, pages, slots = chunk_attention.plans(1024, 512, sequences=4)
    assert slots == 8 + 4 * 8
    for plan in (ours, pages):
        assert plan.positions.tolist() == [1023] * 4
        assert set(plan.items[:, 0].tolist()) == set(range(slots))
    assert len(ours.items) == slots and len(pages.items) == 4 * 16 and pages.shared == 0
    assert (pages.items[:, 3] - pages.items[:, 2] == 1).all()
    together = build(decode_spans(shared([4], [512], 512), 1024))
    for row in range(4):
        met = [sorted(x[:2].tolist() for x in plan.items if x[2] <= row < x[3]) for plan in (together, pages)]
        assert met[0] == met[1]


def test_everything_shared_leaves_one_phase() -> None:
    ours, pages, slots = chunk_attention.plans(1024, 1024, sequences=4)
    assert slots == 1024 // CHUNK == ours.shared == len(ours.items)
    assert len(pages.items) == 4 * slots


def test_cases_of_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Triton's interpreter: what is asked of a device runs, with a figure beside the portable kernels'."""
    monkeypatch.setattr(latents, "CUDA", CPU)
    monkeypatch.setattr(latents, "needs", lambda count: None)
    monkeypatch.setattr(timing, "in_turns", lambda runs: {name: float(len(run())) for name, run in runs.items()})
    monkeypatch.setattr(timing, "gemm_tflops", lambda: 1.0)
    heads = Heads("small", 3, 1, 80)
    rows = latents.prefill(heads, 70), latents.decode(heads, 2, 70), latents.on_a_prefix(heads, 2, 64)
    for row in rows:
        assert row.figures["over_portable"] == 1.0
    assert rows[2].figures["gain"] == 1.0 and rows[1].figures["of_read"] > 0


def test_a_restored_prompt_has_the_bits_of_the_computed_one() -> None:
    row = restores.restored("S1", length=600, rounds=1, gib=0.05)
    assert row.figures["read_mb"] > 0 and row.figures["gain"] > 0


def test_the_planted_fact_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hand-made model finds every fact, wherever it lies, and tells a wrong one."""
    monkeypatch.setitem(long_context.CONTEXTS, "128k", 3000)
    assert long_context.facts("128k").figures["facts"] == lookup_model.NAMES
    assert long_context.facts("128k", restored=True, kv_offloading_size=0.1).figures["facts"] == lookup_model.NAMES
    assert long_context.facts("128k", **long_context.OUTSIDE).figures["facts"] == lookup_model.NAMES
    text = lookup_model.haystack(500)
    right = [lookup_model.answer(value) for value in text.values]
    assert not text.wrong(right) and text.wrong([right[0] + 1, *right[1:]]) == [0]
    monkeypatch.setattr(long_context, "empty", lambda llm: llm.engine.cache.tree.clear())
    with pytest.raises(AssertionError, match="0 tokens were restored or shared"):
        long_context.facts("128k", restored=True)


def test_rows_at_the_end_of_a_context_have_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "CUDA", CPU)
    monkeypatch.setattr(long_context, "needs", lambda count: None)
    monkeypatch.setattr(long_context, "event_ms", lambda run, flush: 2.0)
    row = long_context.far_positions(Heads("small", 2, 1, 16), 530, rows=18, dtype=torch.float32)
    assert row.figures["decode_gbps"] == pytest.approx(2 * 9 * CHUNK * 16 * 4 / 2e6)


def test_the_shipped_model_is_asked_within_its_limits() -> None:
    (row,) = long_context.shipped(prompts=3, lengths=(600,))
    assert row.figures == {"right": 1.0}


def test_refused_settings_leave_a_case_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(long_context.CONTEXTS, "128k", 1000)
    with pytest.raises(LeftOut, match="kv_cache_tokens"):
        long_context.facts("128k", kv_cache_tokens=1)


def test_gaps_are_of_steps_that_serve_everyone() -> None:
    ends = [(1.0, 1), (2.0, 2), (4.0, 2), (5.0, 2), (9.0, 1)]
    steps = [sessions.Step(ended, {str(i): 1 for i in range(count)}) for ended, count in ends]
    assert sessions.whole_gaps(steps, 2, skip=0) == [2.0, 1.0]
    assert sessions.whole_gaps(steps, 2, skip=1) == [1.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_machine_without_a_device_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_tests, "OUTCOMES", device_tests.OUTCOMES)  # the file beside the result
    assert check.main(["--json", str(tmp_path / "found.json")]) == 1
    assert "no CUDA device; nothing was checked" in capsys.readouterr().err


def test_kernels_are_compiled_by_prompts_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one layer answers prompts of each length and batches, greedy and drawn."""
    ran: list[tuple[int, int, float]] = []
    whole = sessions.run

    def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[sessions.Step]:
        assert llm.engine.loaded.decoder.config.layers == 1
        ran.append((len(prompts), len(prompts[0]), params.temperature))
        return whole(llm, prompts, params)

    monkeypatch.setattr(sessions, "run", run)
    monkeypatch.setattr(warm, "LENGTHS", (300, 70))
    warm.compile_kernels("S1")
    assert ran == [(1, 300, 0.0), (1, 70, 0.0), (1, 64, 0.0), (16, 64, 0.0), (1, 64, 0.8), (16, 64, 0.8)]


def test_processes_beside_end_with_their_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails is named; one that takes too long is ended and left out."""

    class Process:
        def __init__(self, status: int | None) -> None:
            self.status, self.killed = status, False

        def wait(self, seconds: float) -> int:
            if self.status is None:
                raise subprocess.TimeoutExpired("warm", seconds)
            return self.status

        def poll(self) -> int | None:
            return self.status

        def kill(self) -> None:
            self.killed = True

    def warming(*statuses: int | None) -> warm.Warming:
        left = iter(statuses)
        monkeypatch.setattr(subprocess, "Popen", lambda command: Process(next(left)))
        return warm.Warming([f"model {number}" for number in range(len(statuses))])

    assert warming(0, 0).result(1).figures["models"] == 2
    with pytest.raises(RuntimeError, match="no kernels for model 1:"):
        warming(0, 1).result(1)
    slow = warming(0, None)
    with pytest.raises(LeftOut, match="not at their end after 1 s more"):
        slow.result(1)
    assert [each.killed for each in slow.processes.values()] == [False, True]
