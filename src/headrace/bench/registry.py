"""All benchmarks, in the order in which `headrace bench --help` lists them: a new one is a file and a line here."""

from __future__ import annotations

from headrace.bench import (
    attention,
    cache,
    choice,
    connections,
    engine,
    fairness,
    offload,
    prefill,
    restart,
    restore,
    score,
    serve,
    speculation,
    structured,
)
from headrace.bench.benchmark import Benchmark

BENCHMARKS: tuple[type[Benchmark], ...] = (
    restore.RestoreBench,
    offload.OffloadBench,
    restart.RestartBench,
    cache.CacheBench,
    connections.ConnectionsBench,
    attention.AttentionBench,
    engine.EngineBench,
    prefill.PrefillBench,
    choice.ChoiceBench,
    score.ScoreBench,
    serve.ServeBench,
    structured.StructuredBench,
    fairness.FairnessBench,
    speculation.SpeculationBench,
)
