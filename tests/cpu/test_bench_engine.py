"""Engines in `headrace bench engine`: how they are set up and say so, and what a busy machine does to them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace.cli import bench_engine, bench_peers
from headrace.cli.bench_peers import ENGINES, Contender

pytestmark = pytest.mark.cpu

FAKE = """
from headrace.cli.bench_protocol import serve

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


def test_setup_is_printed_once_for_each_engine() -> None:
    line = bench_engine.lines()
    case = {"engine": "fake", "setup": "bf16; threads 3", "wall_s": 1.0}
    assert line(case) == "fake: bf16; threads 3\nengine fake  wall_s 1.0"
    assert line(case) == "engine fake  wall_s 1.0"
    assert line(case | {"engine": "other"}).startswith("other: bf16")


def test_libraries_are_preloaded_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library is an obstacle with its reason; the loader only warns of one that does not load."""
    monkeypatch.setattr(bench_peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(bench_peers, "SCRIPTS", tmp_path)
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
    with pytest.raises(bench_engine.Failed, match=r"libfast\.so is in LD_PRELOAD but was not loaded"):
        bench_engine.Process(engine, tmp_path)


def test_vllm_is_set_up_as_its_documentation_says() -> None:
    """With both libraries and one thread bound to each core; `plain` is what it was measured with before."""
    cores = sorted(os.sched_getaffinity(0))
    by_docs, plain = ENGINES["vllm-cpu"], ENGINES["vllm-cpu-plain"]
    assert [Path(pattern).name for pattern in by_docs.preload] == ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    bound = by_docs.own_variables()
    assert bound["OMP_NUM_THREADS"] == str(len(cores))
    assert bound["KMP_AFFINITY"].endswith(f"proclist=[{','.join(map(str, cores))}]")
    assert not plain.preload and set(plain.own_variables()) < set(bound)
