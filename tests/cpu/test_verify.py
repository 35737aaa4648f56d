"""`headrace verify`: equal where the engine keeps its promise, and not where it breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headrace import LLM
from headrace.cli.main import app
from headrace.config import config_from_env
from headrace.doctor import verify
from headrace.engine.core import EngineCore
from headrace.engine.executor import Computed
from headrace.engine.speculation.draft_costs import DraftCost
from headrace.kv.chunk_table import ChunkTable
from headrace.offload.writeback import Writeback
from headrace.types import CHUNK, SamplingParams


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MOST_TOKENS", verify.FEWEST_TOKENS)


def verdicts(report: verify.Report) -> dict[str, bool | None]:
    return {each.schedule: each.equal for each in report.verdicts}


def test_equal() -> None:
    told: list[str] = []
    report = verify.verify(config_from_env(model="tiny"), told.append)
    assert report.equal and set(verdicts(report).values()) == {True} and len(report.verdicts) == 7
    assert report.prefix == verify.FEWEST_TOKENS
    assert [each.schedule for each in report.verdicts] == told[2:]


def test_a_draft_model_drafts_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that seems never to pay."""
    monkeypatch.setattr(DraftCost, "of_token", lambda self, sequences: 1e9)
    found = verdicts(verify.verify(config_from_env(model="tiny", speculative="tiny")))
    assert found["speculated"] is True


def test_an_engine_that_breaks_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of several rows gets logits that differ in the last bit. One report, shown in both ways."""
    compute = EngineCore._compute

    def wrong(engine: EngineCore, slices: list[Any]) -> Computed:
        computed = compute(engine, slices)
        if len(slices) < 2:
            return computed
        nudged = torch.nextafter(computed.logits, torch.tensor(float("inf")))
        return Computed(nudged, computed.parts, None, computed.reported)

    monkeypatch.setattr(EngineCore, "_compute", wrong)
    reports: list[verify.Report] = []

    def once(*given: Any) -> verify.Report:
        if not reports:
            reports.append(verify.verify(*given))
        return reports[0]

    monkeypatch.setattr("headrace.cli.verify.verify", once)
    result = CliRunner().invoke(app, ["verify", "tiny", "--json", "--seconds", "1"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and not found["equal"]
    equal = {each["schedule"]: each["equal"] for each in found["verdicts"]}
    assert equal["batched"] is False and equal["cached"] is True
    shown = CliRunner().invoke(app, ["verify", "tiny", "--seconds", "1"])
    assert shown.exit_code == 1 and "other bits by: batched" in shown.stdout


def test_what_did_not_take_place_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.PLAIN, "enable_prefix_caching", False)
    report = verify.verify(config_from_env(model="tiny"))
    found = verdicts(report)
    assert report.equal and found["batched"] is True
    assert found["cached"] is None
    restored = report.verdicts[-1]
    assert restored.equal is None and restored.note.startswith("does not go with these settings: ")


def test_given_tiers_and_drafts_are_those_that_are_tried(tmp_path: Path) -> None:
    given = dict(kv_offload_path=str(tmp_path), kv_offload_activations="on", speculative="ngram")
    report = verify.verify(config_from_env(model="tiny", **given))
    assert report.equal and report.verdicts[-1].note.endswith("tokens from disk")
    group = next(each for each in verify.GROUPS if each.schedules[0][0] == "speculated")
    assert group.settings(config_from_env(model="tiny", **given), 1) == {"speculative": "ngram"}


def test_the_crowded_pool_is_that_of_all_context_ranks() -> None:
    group = next(each for each in verify.GROUPS if each.schedules[-1][0] == "preempted")
    for ranks, chunks in ((1, 13), (2, 7), (3, 5)):
        found = group.settings(config_from_env(model="tiny", context_parallel_size=ranks), 10)
        assert found["kv_cache_tokens"] == chunks * CHUNK


def test_streaming_is_tried_where_it_is_asked_for() -> None:
    given = dict(offload_schedule="column", kv_offloading_size=0.1, weight_offload=True)
    report = verify.verify(config_from_env(model="tiny", **given))
    assert report.equal and verdicts(report)["streamed"] is True


def test_rounded_tiers_are_told_to_be_so() -> None:
    report = verify.verify(config_from_env(model="tiny", kv_offloading_size=0.1, kv_host_format="int4"))
    assert report.equal and verdicts(report)["restored from a tier"] is None
    assert "kv_host_format int4 rounds what is kept" in report.verdicts[-1].note


def test_chunks_that_the_pool_had_no_time_to_store_are_stored_while_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    park = Writeback.park

    def hurried(self: Writeback, table: ChunkTable) -> None:
        park(self, table)
        self.make_room()

    monkeypatch.setattr(Writeback, "park", hurried)
    monkeypatch.setattr(verify, "STORED_S", 5.0)
    with LLM("tiny", **verify.PLAIN | {"kv_cache_tokens": 1024, "kv_offloading_size": 1.0}) as llm:
        prompt = verify.Prompt(list(range(200)), SamplingParams(max_tokens=2))
        verify.Engine(llm, [prompt], ())._until_stored()
        assert llm.engine.stats().restore.unstored == 0


def test_the_fingerprint_tells_engines_apart() -> None:
    def fingerprint(**settings: Any) -> str:
        with LLM("tiny", kv_cache_tokens=1024, **settings) as llm:
            return llm.capacity.fingerprint

    plain = fingerprint()
    assert plain.startswith("fp_") and len(plain) == 19
    assert fingerprint(max_batch_tokens=128) == plain  # a schedule, not other bits
    assert fingerprint(kv_cache_dtype="int8") != plain
