"""`headrace bench`: measurements in one fixed result format."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace import cores
from headrace.bench.load import Sample, ask_all, first_error, new_client, quantile
from headrace.bench.result import JsonFile, measure_cases, one_of, write_result
from headrace.cli import bench_kv
from headrace.console import err, one_line_errors, out, working

app = typer.Typer(help="Measure; --json FILE writes the result.", no_args_is_help=True, rich_markup_mode=None)
for command in (bench_kv.restore, bench_kv.offload, bench_kv.restart):
    app.command()(command)


@app.callback()
def _group() -> None:
    """Each benchmark prints its figures; those of a run under other load are worth little."""


@app.command()
def cache(
    model: Annotated[str, typer.Option(help="Shape of the decode step: S1, S2, S3 (random weights) or tiny.")] = "S1",
    json_file: JsonFile = None,
) -> None:
    """Cost of the prefix tree and the plan: matching a long prompt, and book-keeping as a share of a decode step."""
    from headrace.bench.cache import SHAPES, bookkeeping_case, match_case

    with one_line_errors():
        if model not in (*SHAPES, "tiny"):
            raise ValueError(f"model must be one of {', '.join(SHAPES)}, tiny; got {model!r}")
        cases = []
        for run in (match_case, lambda: bookkeeping_case(model)):
            with working("measuring"):
                cases.append(run())
            out.print("  ".join(f"{name} {value}" for name, value in cases[-1].items()))
        write_result(json_file, cases)


@app.command()
def connections(
    json_file: JsonFile = None,
    idle: Annotated[int, typer.Option(min=1, help="Silent connections that strangers hold.")] = 1100,
    clients: Annotated[int, typer.Option(min=1, help="Clients with a key that ask at once.")] = 64,
    each: Annotated[int, typer.Option(min=1, help="Requests of each in a round.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds without and with the strangers, in turns.")] = 5,
) -> None:
    """Time to first token beside silent connections, more of them than the server has file descriptors (1,024)."""
    from headrace.bench.connections import cases

    with one_line_errors():
        measure_cases(cases(idle, clients, each, repeats), json_file)


@app.command()
def attention(
    json_file: JsonFile = None,
    thread_count: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Threads. Default: decode on one and on all, the rest on all."),
    ] = None,
    cases: Annotated[str, typer.Option(help="Only cases whose names begin so, by commas: decode_,prefill_gqa.")] = "",
    quick: Annotated[
        bool, typer.Option(help="Tiny sizes, one repetition: shows that it runs, measures nothing.")
    ] = False,
) -> None:
    """Attention and linear kernels beside torch's, beside no sharing, and beside the machine's limits."""
    from headrace.bench.attention import QUICK, AttentionBench, Sizes

    with one_line_errors():
        counts = [thread_count] if thread_count else sorted({1, cores.usable()})
        bench = AttentionBench(QUICK if quick else Sizes(), counts)
        with working("measuring the machine"):
            limits = bench.machine()
        out.print("  ".join(f"{name} {value}" for name, value in limits.items()), soft_wrap=True)
        measure_cases(bench.cases(cases), json_file, limits)


@app.command()
def engine(
    json_file: JsonFile = None,
    workloads: Annotated[
        str, typer.Option(help="Workloads, by commas: W1 to W5, or one case of them: W1_8192.")
    ] = "W1,W2,W3,W4,W5",
    models: Annotated[str, typer.Option(help="Random-weight shapes, by commas: S1, S2, S3.")] = "S1",
    engines: Annotated[
        str, typer.Option("--engine", help="Engines, by commas, or 'all': peers need `make bench-peers`.")
    ] = "headrace",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each case, the engines in turn.")] = 5,
    quick: Annotated[bool, typer.Option(help="Tiny lengths, one repetition: shows that it runs.")] = False,
    busy_neighbour: Annotated[
        bool,
        typer.Option(
            "--busy-neighbour",
            help="Run with one busy process per core beside the engines, and once without: how much slower each "
            "becomes.",
        ),
    ] = False,
) -> None:
    """Whole engines on the same work, each in a process of its own: time to first token, decoding speed, memory."""
    from headrace.bench.engine import lines, run_all
    from headrace.bench.limits import Limits

    with one_line_errors():
        work, shapes, names = (text.split(",") for text in (workloads, models, engines))
        found = run_all(work, shapes, names, 1 if quick else repeats, scale=32 if quick else 1, busy=busy_neighbour)
        counts = sorted({1, cores.usable()})
        with working("measuring the machine"):
            limits = (Limits(1 << 20, 128) if quick else Limits()).figures(counts, 1 if quick else 5)
        measure_cases(found, json_file, limits, lines())


@app.command()
def prefill(
    model: Annotated[
        str, typer.Argument(help="Model folder, 'tiny', or a shape with random weights: S1, S2, S3.")
    ] = "tiny",
    json_file: JsonFile = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, by commas.")] = "2",
    tokens: Annotated[str, typer.Option(help="New tokens, by commas.")] = "1024,2048,4096,8192,16384",
    cached: Annotated[str, typer.Option(help="Cached tokens before them, by commas: multiples of 64.")] = "0",
    strategies: Annotated[
        str,
        typer.Option(
            help="By commas. chain-even: even blocks; chain: the table's, searched without one; chain-searched: "
            "searched, a table or not."
        ),
    ] = "single,gather,gather-full,chain-even,chain,ring-kv,ring-q",
    bandwidth: Annotated[
        str, typer.Option(help="GB/s of each link between two ranks, by commas; 'none': as fast as it goes.")
    ] = "none",
    latency_ms: Annotated[float, typer.Option(help="Milliseconds that each message takes longer.")] = 0.0,
    jitter: Annotated[float, typer.Option(help="Each message takes up to this share longer or shorter: 0.5.")] = 0.0,
    link: Annotated[
        str, typer.Option(help="limited: delayed in the ranks. netns: network namespaces limited by tc (root).")
    ] = "limited",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each case, the strategies in turn.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each rank.")] = 1,
    dtype: Annotated[str, typer.Option(help="Compute type: bfloat16, float32, auto.")] = "auto",
    table: Annotated[Path | None, typer.Option(help="Table of `headrace tune` for the chain's blocks.")] = None,
    search: Annotated[bool, typer.Option(help="Search the chain's blocks; else the cost model's.")] = True,
    stride: Annotated[int, typer.Option(min=1, help="Tokens between two bounds that the search tries.")] = 64,
    search_repeats: Annotated[int, typer.Option(min=1, help="Prefills of each searched point.")] = 2,
    placement: Annotated[
        str, typer.Option(help="Cached chunks: own (as the strategy places them), round (in turn), last (one rank).")
    ] = "own",
    plot: Annotated[Path | None, typer.Option(help="PNG that takes a plot.")] = None,
) -> None:
    """Time to the first token of one prompt on several ranks, by each strategy, beside one rank by itself."""
    from headrace.bench import prefill, prefill_report

    with one_line_errors():
        if plot is not None:
            prefill_report.plotter()
        plan = prefill.Plan(
            model, prefill.numbers("ranks", ranks), prefill.numbers("tokens", tokens),
            prefill.numbers("cached", cached), tuple(strategies.split(",")),
            prefill.links(bandwidth, latency_ms, jitter), repeats, threads, dtype,
            one_of("link", link, ("limited", "netns")) == "netns", prefill.load_table(table), search, stride,
            search_repeats, one_of("placement", placement, ("own", "round", "last")),
        )  # fmt: skip
        bench = prefill.PrefillBench(plan)
        done = measure_cases(bench.cases(), json_file, bench.profile, prefill.line)
        out.print(prefill_report.ratios(done), soft_wrap=True)
        if plot is not None:
            prefill_report.plot(done, plot)
            err.print(f"wrote {plot}", style="dim")


@app.command()
def choice(
    model: Annotated[
        str, typer.Argument(help="Model folder, 'tiny', or a shape with random weights: S1, S2, S3.")
    ] = "tiny",
    json_file: JsonFile = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, by commas.")] = "2",
    tokens: Annotated[str, typer.Option(help="New tokens, by commas.")] = "64,256,1024,4096",
    cached: Annotated[str, typer.Option(help="Cached tokens before them, by commas: multiples of 64.")] = "0,2048,8192",
    bandwidth: Annotated[
        str, typer.Option(help="GB/s of each link between two ranks, by commas; 'none': as fast as it goes.")
    ] = "0.1,1",
    latency_ms: Annotated[float, typer.Option(help="Milliseconds that each message takes longer.")] = 0.0,
    link: Annotated[
        str, typer.Option(help="limited: delayed in the ranks. netns: network namespaces limited by tc (root).")
    ] = "limited",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each cell, the strategies in turn.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each rank.")] = 1,
    dtype: Annotated[str, typer.Option(help="Compute type: bfloat16, float32, auto.")] = "auto",
    table: Annotated[Path | None, typer.Option(help="Table of `headrace tune`: blocks and corrections.")] = None,
    rule: Annotated[str, typer.Option(help="How the planner chooses: cost, alg1, alg5, heuristic.")] = "cost",
    placement: Annotated[
        str, typer.Option(help="Cached chunks: round (in turn) or last (on the last rank).")
    ] = "round",
) -> None:
    """What the planner picks beside the best of all strategies, measured, and where pass-Q starts to win."""
    from headrace.bench import choice, prefill

    with one_line_errors():
        plan = prefill.Plan(
            model, prefill.numbers("ranks", ranks), prefill.numbers("tokens", tokens),
            prefill.numbers("cached", cached), links=prefill.links(bandwidth, latency_ms, 0.0),
            repeats=repeats, threads=threads, dtype=dtype, netns=one_of("link", link, ("limited", "netns")) == "netns",
            table=prefill.load_table(table), placement=one_of("placement", placement, ("round", "last")),
        )  # fmt: skip
        bench = choice.ChoiceBench(plan, one_of("rule", rule, ("cost", "alg1", "alg5", "heuristic")))
        out.print(choice.summary(measure_cases(bench.cases(), json_file, bench.profile, choice.line)))


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 64,
    at_once: Annotated[int, typer.Option(min=1, help="How many of them at one time.")] = 16,
    shared_words: Annotated[int, typer.Option(min=0, help="Words that all prompts begin with.")] = 1000,
    own_words: Annotated[int, typer.Option(min=1, help="Words of each prompt's own.")] = 50,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    api_key: Annotated[str | None, typer.Option(envvar="HEADRACE_API_KEY", help="Key of the server.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the words.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Load on a running server: latency and throughput of streaming chat requests with a common beginning."""
    with one_line_errors():
        conversations = _conversations(random.Random(seed), requests, shared_words, own_words)
        case = asyncio.run(_measure(url.rstrip("/"), api_key, conversations, at_once, max_tokens))
        sizes = {"at_once": at_once, "shared_words": shared_words, "own_words": own_words, "max_tokens": max_tokens}
        for name, value in case.items():
            out.print(f"{name:32} {value}")
        write_result(json_file, [{"name": "serve", **sizes, **case}])


def _conversations(rng: random.Random, count: int, shared: int, own: int) -> list[list[dict[str, str]]]:
    words = "stone river light garden winter silver mountain letter harbour window morning kingdom".split()  # noqa: SIM905

    def text(n: int) -> str:
        return " ".join(rng.choice(words) for _ in range(n))

    system = text(shared)
    head = [{"role": "system", "content": system}] if shared else []
    return [[*head, {"role": "user", "content": text(own)}] for _ in range(count)]


async def _measure(
    url: str, api_key: str | None, conversations: list[list[dict[str, str]]], at_once: int, max_tokens: int
) -> dict[str, Any]:
    from rich.progress import Progress

    async with new_client(url + "/v1", api_key) as client:
        model = (await client.models.list()).data[0].id
        with Progress(console=err, transient=True) as progress:
            bar = progress.add_task("requests", total=len(conversations))
            options = {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
            began = time.perf_counter()
            try:
                samples = await ask_all(client, model, conversations, at_once, lambda: progress.advance(bar), **options)
            except BaseExceptionGroup as group:
                raise RuntimeError(f"a request failed: {first_error(group)}") from None
    return summary(samples, time.perf_counter() - began)


def summary(samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Figures of a run: latencies as medians and 95 %, rates over the whole of it."""
    ttft = [s.ttft_s for s in samples]
    gaps = [(s.total_s - s.ttft_s) / (s.output_tokens - 1) for s in samples if s.output_tokens > 1]
    prompt, output = sum(s.prompt_tokens for s in samples), sum(s.output_tokens for s in samples)
    return {
        "requests": len(samples),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(samples) / seconds, 3),
        "prompt_tokens": prompt,
        "cached_share": round(sum(s.cached_tokens for s in samples) / prompt, 4),
        "output_tokens_per_s": round(output / seconds, 1),
        "ttft_median_s": round(quantile(ttft, 0.5), 4),
        "ttft_p95_s": round(quantile(ttft, 0.95), 4),
        "time_per_token_median_s": round(quantile(gaps, 0.5), 5) if gaps else None,
    }
