"""`headrace bench serve`: what it says where it cannot measure, when it sends requests, its screen; caches."""

from __future__ import annotations

import itertools
import json
import random
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.bench import serve, shapes
from headrace.bench.caches import cache_folder, notice
from headrace.bench.load import Sample
from headrace.bench.shapes import SHAPES, CheckpointShape
from headrace.cli.main import app
from tests.support.fake_server import serving

pytestmark = pytest.mark.unit


def run(*arguments: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(app, ["bench", "serve", *arguments], env={"HEADRACE_API_KEY": ""})
    return ran.exit_code, ran.stdout, ran.stderr


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    told = f"cannot reach {url}: connection refused; start one with `headrace serve MODEL`, or give --url\n"
    assert run("--url", url) == (1, "", f"headrace: {told}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--url", "localhost:8000"), "url must begin with http:// or https://, got 'localhost:8000'"),
        (("--request-rate", "0"), "request_rate must be above 0 requests/s, got 0"),
    ],
)
def test_options_that_cannot_be(arguments: tuple[str, str], told: str) -> None:
    assert run(*arguments) == (2, "", f"headrace: {told}\n")


def test_keys_and_the_screen() -> None:
    with serving(api_key="k3y", served_model_name="tiny") as server:
        url = f"http://127.0.0.1:{server.port}"
        told = f"headrace: {url} refuses the key: give --api-key KEY, or set HEADRACE_API_KEY\n"
        assert run("--url", url, "--api-key", "wrong") == (2, "", told)
        code, screen, err = run("--url", url, "--api-key", "k3y", "--requests", "3", "--request-rate", "500",
                                "--shared-words", "2", "--own-words", "3", "--max-tokens", "4")  # fmt: skip
    assert code == 0, err
    lines = screen.splitlines()
    assert lines[0] == f"tiny at {url}: 3 requests, 500 a second; 2 shared and 3 own words, 4 tokens each"
    assert lines[2:4] == [
        "requests   seconds  requests     input  from the cache    output",
        "                 s       1/s  tokens/s               %  tokens/s",
    ]
    assert lines[6].split() == ["latency", "p50", "p90", "p99"] and lines[7].split() == ["ms", "ms", "ms"]
    names = [" ".join(line.split()[:-3]) for line in lines[8:]]
    assert names == ["first token", "each further token", "whole answer"]


def test_requests_arrive_as_a_poisson_process() -> None:
    assert serve.arrivals(random.Random(1), 3, None) == [0.0, 0.0, 0.0]
    starts = serve.arrivals(random.Random(1), 2001, 50.0)
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert starts[0] == 0.0 and min(gaps) > 0
    assert sum(gaps) / 2000 == pytest.approx(1 / 50, rel=0.1)
    assert sum(gap > 1 / 50 for gap in gaps) / 2000 == pytest.approx(0.368, abs=0.05), "1 / e, as of no other process"


def test_a_rate_lifts_the_bound() -> None:
    assert serve.ServeBench()._at_once() == 16
    assert serve.ServeBench(request_rate=2.0)._at_once() == 64
    assert serve.ServeBench(request_rate=2.0, at_once=3)._at_once() == 3
    assert "64 requests, 2 a second, 3 at once; " in serve.ServeBench(request_rate=2.0, at_once=3)._load() + " "


def test_quantiles() -> None:
    samples = [Sample("", 0.001 * n, 0.001 * n + 0.01, 10, 5, 11) for n in range(1, 101)]
    case = serve._summed(samples, 2.0)
    assert (case["ttft_p50_s"], case["ttft_p90_s"], case["ttft_p99_s"]) == (0.051, 0.091, 0.1)
    assert case["time_per_token_p99_s"] == pytest.approx(0.001) and case["latency_p50_s"] == pytest.approx(0.061)
    assert (case["requests_per_s"], case["prompt_tokens_per_s"], case["output_tokens_per_s"]) == (50.0, 500.0, 550.0)
    assert case["cached_share"] == 0.5


# ---- caches ----------------------------------------------------------------------------------------------------------


def test_caches_are_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HEADRACE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == tmp_path / ".cache" / "headrace"
    assert notice("S1, random weights", 2**30, cache_folder() / "S1") == (
        "writing S1, random weights (1.00 GiB) to ~/.cache/headrace/S1, once; HEADRACE_CACHE_DIR puts it elsewhere"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "headrace", "the specification has such a value ignored"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_folder() == Path("/var/cache/me/headrace")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_a_checkpoint_of_other_sizes_is_written_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    written: list[int] = []

    def write(shape: CheckpointShape, folder: Path) -> None:
        written.append(shape.layers)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shapes._config(shape)))

    monkeypatch.setattr(shapes, "write_checkpoint", write)
    for layers in (1, 1, 2):
        monkeypatch.setitem(SHAPES, "S1", CheckpointShape(64, layers, 2, 1, 32, 64))
        assert shapes.checkpoint("S1") == tmp_path / "bench" / "S1"
    assert written == [1, 2]
    assert capsys.readouterr().err.count(", once; HEADRACE_CACHE_DIR puts it elsewhere\n") == 2
