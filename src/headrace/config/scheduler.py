"""Settings of the scheduler and of the requests that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace.config.fields import SettingsRecord, at_least, between, setting

SchedulingPolicy = Literal["fair", "fcfs"]


@dataclass(frozen=True, slots=True)
class SchedulerSettings(SettingsRecord):
    """EngineConfig replaces max_batch_tokens 0 by a default that depends on the ranks and the device."""

    title: ClassVar[str] = "Scheduler"

    max_batch_tokens: int = setting(
        0,
        "Most tokens computed in one step. Default (0): 2048, on a GPU 8192, with several context ranks 16384.",
        "--max-num-batched-tokens",
        unit="tokens",
        check=at_least(1),
    )
    max_sequences: int = setting(256, "Most sequences running at once.", "--max-num-seqs", check=at_least(1))
    policy: SchedulingPolicy = setting(
        "fair",
        "Whose prompt is computed next: fair (tenants take turns by weight; within a tenant by priority, then as "
        "they came, much shorter ones first) or fcfs (as they came).",
        name="scheduling_policy",
    )
    async_scheduling: bool = setting(
        True,
        "On a GPU: launch a step while the one before still runs, wherever its tokens can be chosen there.",
        rare=True,
    )
    seed: int = setting(0, "Seed of requests that bring none.", check=between(-(2**63), 2**63 - 1))
