"""Models with recurrent layers on a fake GPU (tests.support.fake_device), of one gated delta net and one layer of
attention: the same bits in every schedule, replayed and launched, and near transformers. Other kinds of recurrent
layers: near transformers, replayed and cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.device import current
from headrace.engine import graph_buckets
from headrace.engine.runner import Runner
from headrace.host import GIB
from headrace.kernels.triton import graph_step
from headrace.kv.node import Node
from headrace.offload.restore import timing
from headrace.offload.stored_states import StoredStates
from headrace.types import Request
from tests.support.adapters import with_adapter, write_adapter
from tests.support.delayed_device import delayed_device
from tests.support.drafting import answered, drafts_from
from tests.support.fake_device import FakeDevice, fake_device
from tests.support.greedy_answers import greedy_behind
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.offloading import flush, forced, look_at_once, watched
from tests.support.small_gpu_engines import launched, tokens
from tests.support.traces import run, same

SMALL: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=8, linear_num_key_heads=1,
    linear_num_value_heads=1, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
PLAIN: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
GRANITE = PLAIN | dict(layer_types=["mamba", "attention"], mamba_n_heads=4, shared_intermediate_size=32)
NEMOTRON = PLAIN | dict(head_dim=16, mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=16)
LFM2 = PLAIN | dict(layer_types=["conv", "full_attention"])
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
WITHOUT_GATES = EXPERTS | dict(n_routed_experts=4, moe_shared_expert_intermediate_size=32)
KIMI: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, layer_types=["linear_attention", "full_attention"], linear_num_heads=2, linear_head_dim=16,
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_experts=4, num_experts_per_token=2,
    moe_intermediate_size=32,
)  # fmt: skip
FALCON = PLAIN | dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=16, head_dim=16)
OTHERS: dict[str, dict[str, Any]] = {
    "lfm2": LFM2,
    "lfm3": PLAIN | dict(layer_types=["conv", "sliding_attention", "full_attention"], num_hidden_layers=3),
    "granite": GRANITE,
    "nemotron": NEMOTRON | dict(hybrid_override_pattern="M-*"),
    "lfm2_experts": LFM2 | EXPERTS | dict(num_experts=4),
    "granite_experts": GRANITE | dict(num_local_experts=4, num_experts_per_tok=2),
    "nemotron_experts": NEMOTRON | WITHOUT_GATES | dict(hybrid_override_pattern="ME*E"),
    "kimi": KIMI,
    "falcon_h1": FALCON,
}
"""With short convolutions, and with Mamba-2 layers: also one that no MLP follows, and experts without gates."""
ONE, TWO, SIX = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, 2, 6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("3_5", tmp_path_factory.mktemp("hybrid"), **SMALL)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    monkeypatch.setattr(Runner, "record", lambda self: None)
    monkeypatch.setattr(graph_buckets, "SMALL", (2, 4))
    monkeypatch.setattr(graph_step, "PROGRAMS", 1)
    monkeypatch.setattr(graph_step, "MERGES", 4)
    monkeypatch.setattr(timing, "call_seconds", lambda work, most_s=0.05: 1e-3)
    with fake_device(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 1024, "max_sequences": 4, "recurrent_states": 8, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


@pytest.mark.parametrize(
    "kind",
    [
        *("3_5", "lfm2", "nemotron", "kimi", "falcon_h1"),
        *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("next_experts", "granite", "lfm3")),
        *(pytest.param(kind, marks=pytest.mark.matrix) for kind in OTHERS if "experts" in kind),
    ],
)
def test_logits_are_those_of_transformers(kind: str, fake: FakeDevice, tmp_path: Path) -> None:
    """Gates of attention, norms that add 1 and a part of each head rotated; experts, and the one beside them."""
    folder, given = make_checkpoint(kind, tmp_path / kind, **OTHERS.get(kind, SMALL)), tokens(9, 1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        difference = engine(folder).logits(given) - model(torch.tensor([given])).logits[0]
    assert difference.abs().max() < 1e-4


def test_replayed_and_cut_are_the_same_as_launched_alone(folder: Path, fake: FakeDevice) -> None:
    """By slices of four rows, the last of them beside another prompt. Recording changes no state."""
    replayed_and_cut(folder)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["lfm2", "granite", "nemotron_experts", "kimi", "falcon_h1"])
def test_other_layers_replayed_and_cut(kind: str, fake: FakeDevice, tmp_path: Path) -> None:
    replayed_and_cut(make_checkpoint(kind, tmp_path, **OTHERS[kind]))


def replayed_and_cut(folder: Path) -> None:
    """Two prompts have the answers that each has alone and launched."""
    prompts = [tokens(5, 1), tokens(2, 2)]
    llm = engine(folder, max_batch_tokens=4, max_sequences=2)
    truth = [launched(llm, [prompt], TWO)[0] for prompt in prompts]
    same(run(llm, prompts, TWO), truth)
    stats = llm.engine.stats().graphs
    assert stats.prompts == 2 and stats.replayed == 3 and not stats.eager


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["3_5", "nemotron"])
def test_adapters_of_recurrent_layers(kind: str, fake: FakeDevice, tmp_path: Path) -> None:
    """Of their gates, which are in fp32, too."""
    folder, given = make_checkpoint(kind, tmp_path / kind, **OTHERS.get(kind, SMALL)), tokens(9, 1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    write_adapter(tmp_path / "a", model, r".*(in_proj\w*|out_proj)", seed=1, size=3.0)
    llm = engine(folder, lora_modules=f"a={tmp_path / 'a'}")
    ours, plain = (llm.generate([given], SIX, adapter=name)[0].token_ids for name in ("a", ""))
    assert ours == greedy_behind(with_adapter(model, tmp_path / "a"), given, ours) != plain


Plan = list[tuple[int, str, list[int], SamplingParams | None]]
"""Before which step requests are added, their names, prompts and parameters; None: it is aborted."""


def played(llm: LLM, plan: Plan) -> dict[tuple[str, int], list[Any]]:
    """Tokens, log probabilities and ends of the answers. Whatever is planned, all agrees after each step."""
    core, step, left = llm.engine, 0, list(plan)
    answers: dict[tuple[str, int], list[Any]] = {}
    while left or core.has_work:
        while left and left[0][0] <= step:
            _, name, prompt, params = left.pop(0)
            if params is None:
                core.abort(name)
            else:
                core.add(Request(name, prompt, params))
        for delta in core.step():
            told = answers.setdefault((delta.request_id, delta.index), [])
            told += [*delta.token_ids, *(delta.logprobs or []), delta.finish_reason]
        step += 1
        core.overlap.check()
    return answers


def kept(llm: LLM) -> dict[bytes, list[torch.Tensor]]:
    """By the name of each chunk its keys and values, and the state behind it, where there is one."""
    current().synchronize()
    runner, found = llm.engine.loaded.executor, dict[bytes, list[torch.Tensor]]()
    assert isinstance(runner, Runner) and runner.states is not None
    for digest, node in llm.engine.cache.tree.nodes.items():
        found[digest] = [each[node.slot].clone() for pool in runner.storage.pools for each in pool.tensors]
        if node.state >= 0:
            layers = runner.states.layers
            found[digest] += [part[node.state].clone() for each in layers for part in (each.last, each.matrices)]
    return found


def same_bits(found: dict[bytes, list[torch.Tensor]], wanted: dict[bytes, list[torch.Tensor]]) -> None:
    assert found.keys() == wanted.keys()
    for digest, parts in found.items():
        assert len(parts) == len(wanted[digest]), "a state is kept in one way alone"
        assert all(torch.equal(one, other) for one, other in zip(parts, wanted[digest], strict=True))


def test_a_step_ahead_gives_the_same_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a device that is late: a prompt comes, and is read by slices beside a sequence that decodes."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    monkeypatch.setattr(graph_buckets, "SMALL", (4,))
    found = {}
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            llm = engine(folder, max_batch_tokens=4, max_sequences=2, async_scheduling=ahead)
            found[ahead] = played(llm, [(0, "a", tokens(3, 1), SIX), (2, "b", tokens(5, 2), TWO)])
            stats = llm.engine.stats().graphs
            assert (late.most_ahead, stats.eager, stats.ahead) == ((2, 0, 3) if ahead else (1, 0, 0))
    assert found[True] == found[False]


@pytest.mark.matrix
def test_steps_ahead_leave_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of a prompt whose answer fills its chunk, beside one that forks and is drawn from, and one that is
    aborted; then of one that goes on from the answer's state. Keys, values and states that outlast
    them are the same."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    monkeypatch.setattr(graph_buckets, "SMALL", (4,))
    drawn = SamplingParams(temperature=0.9, seed=1, max_tokens=4, n=2, logprobs=2, ignore_eos=True)
    first, found = tokens(62, 1), {}
    plan: Plan = [
        (0, "a", first, replace(SIX, max_tokens=9)), (4, "b", tokens(7, 2), drawn), (5, "c", tokens(9, 3), SIX),
        (7, "c", [], None),
    ]  # fmt: skip
    for ahead in (True, False):
        with delayed_device(monkeypatch) as late:
            llm = engine(folder, max_batch_tokens=66, async_scheduling=ahead)
            answers = played(llm, plan)
            known = [*first, *(token for token in answers["a", 0] if isinstance(token, int))]
            answers |= played(llm, [(0, "d", [*known, 5], SIX)])
            found[ahead], stats = (answers, kept(llm)), llm.engine.stats()
            assert (late.most_ahead, stats.graphs.eager, stats.tokens.cached) == (1 + ahead, 0, 64)
            assert stats.graphs.ahead > stats.graphs.replayed // 2 if ahead else not stats.graphs.ahead
    del found[True][0]["c", 0], found[False][0]["c", 0]
    assert found[True][0] == found[False][0]
    same_bits(found[True][1], found[False][1])


@pytest.mark.matrix
def test_states_evicted_by_a_step_ahead_come_back(
    folder: Path, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two prompts that come while a sequence decodes, in three slots: the last slice of the second one takes that of
    the first one's state, which goes to host memory before the step that overwrites it, and comes back as it was."""
    prompts, left = [tokens(66, seed) for seed in (1, 2)], list[bool]()
    store, found = StoredStates._leaving, {}

    def leaves(self: StoredStates, node: Node) -> None:
        left.append(llm.engine.scheduler.ahead)
        store(self, node)

    monkeypatch.setattr(StoredStates, "_leaving", leaves)
    for ahead in (True, False):
        llm = engine(
            folder, max_batch_tokens=40, max_sequences=2, recurrent_states=3, kv_offloading_size=0.01,
            async_scheduling=ahead,
        )  # fmt: skip
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(0.0, 0.0)
        look_at_once(llm)
        plan: Plan = [(0, "a", tokens(3, 9), replace(SIX, max_tokens=12))]
        plan += [(2 + 4 * number, str(number), prompt, TWO) for number, prompt in enumerate(prompts)]
        answers = played(llm, plan)
        flush(llm)
        assert (ahead in left) and bool(llm.engine.stats().graphs.ahead) == ahead
        answers |= played(llm, [(0, "again", prompts[0], TWO)])
        assert llm.engine.stats().restore.loaded_tokens == 64
        assert answers["again", 0] == answers["0", 0]
        found[ahead] = answers
        llm.close()
    assert found[True] == found[False]


@pytest.mark.matrix
def test_drafted_is_the_same_as_launched(folder: Path, fake: FakeDevice) -> None:
    """Right and wrong drafts: of each a second state is left, in the same replayed step."""
    llm = engine(folder, speculative="ngram", num_speculative_tokens=2, max_sequences=1)
    prompt = tokens(3, 2)
    truth = launched(llm, [prompt], SIX)
    known = answered(prompt, truth[0])
    drafts_from(llm, [[*known[:5], (known[5] + 1) % 64, 5, 5]])
    same(run(llm, [prompt], SIX), truth)
    spoken, stats = llm.engine.stats().speculation, llm.engine.stats().graphs
    assert 0 < spoken.accepted < spoken.drafted and not stats.eager


@pytest.mark.matrix
def test_shared_and_restored_are_the_same_as_launched_alone(folder: Path, fake: FakeDevice) -> None:
    """Two prompts in one launched step: the second goes on from the state that the first leaves in it. Then one is
    replayed from a kept state, and from one of host memory."""
    prompt = tokens(65, 1)
    truth = launched(engine(folder), [prompt], ONE)
    llm = engine(folder, max_batch_tokens=66, max_sequences=2, kv_offloading_size=0.01)
    runner = llm.engine.loaded.executor
    assert llm.engine.offload is not None and isinstance(runner, Runner)
    llm.engine.offload.choose, runner.mixed = forced(0.0, 0.0), runner.eager
    look_at_once(llm)
    same(watched(llm, [prompt, prompt], ONE), truth * 2)
    before = llm.engine.stats().tokens.cached
    same(watched(llm, [prompt], ONE), truth)
    assert llm.engine.stats().tokens.cached == before + 64
    flush(llm)
    same(watched(llm, [prompt], ONE), truth)
    assert llm.engine.stats().restore.loaded_tokens == 64 and llm.engine.stats().graphs.replayed == 2
    llm.close()


def test_states_that_do_not_fit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 992 bytes each: 4 * 16 * 8 of the matrix, 3 * 40 inputs."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    with fake_device(monkeypatch, memory=GIB), pytest.raises(ValueError, match=r"recurrent_states 2,000,000 need 1.8"):
        engine(folder, recurrent_states=2_000_000)


def test_what_is_not_built_is_refused(folder: Path, fake: FakeDevice) -> None:
    with pytest.raises(ValueError, match="has recurrent layers"):
        engine(folder, offload_schedule="row", kv_offloading_size=1)
