"""`headrace bench`: keys and values that outlive their memory (restore, offload, restart)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.result import JsonFile, measure_cases, one_of
from headrace.console import err, one_line_errors, out


def restore(
    json_file: JsonFile = None,
    models: Annotated[str, typer.Option(help="Random-weight shapes, by commas: S1 (GQA), S2 (MHA), S3.")] = "S2,S1",
    links: Annotated[
        str, typer.Option(help="GB/s of the emulated link, by commas; balance: loading all as slow as recomputing.")
    ] = "0.1,0.3,1,3,10,30,balance",
    tokens: Annotated[int, typer.Option(help="Stored tokens: a multiple of 64.")] = 4096,
    suffix: Annotated[int, typer.Option(help="New tokens after them.")] = 32,
    latency_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds that each transfer takes longer.")] = 0.0,
    stride: Annotated[int, typer.Option(help="Chunks of 64 tokens between two splits of the sweep.")] = 8,
    repeats: Annotated[int, typer.Option(help="Repetitions of the splits that matter, in turns.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the engine. Default: all cores.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG that takes a plot.")] = None,
) -> None:
    """A stored prompt comes back: the solver's split beside loading all, recomputing all, and every other split."""
    from headrace.bench import prefill_report, restore

    with one_line_errors():
        if plot is not None:
            prefill_report.plotter()
        plan = restore.Plan(
            tuple(models.split(",")),
            restore.links_of(links),
            tokens,
            suffix,
            latency_ms,
            stride,
            repeats,
            threads,
        )
        done = measure_cases(restore.cases(plan), json_file, line=restore.line)
        out.print(restore.table(done), soft_wrap=True)
        if plot is not None:
            restore.plot(done, plot)
            err.print(f"wrote {plot}", style="dim")


def offload(
    model: Annotated[
        str, typer.Argument(help="Model folder, 'tiny', or a shape with random weights: S1, S2, S3.")
    ] = "S2",
    json_file: JsonFile = None,
    rates: Annotated[str, typer.Option(help="GB/s of the emulated link each way, by commas.")] = "0.25,0.5,1,2",
    shares: Annotated[str, typer.Option(help="Further shares of chunks to project, by commas.")] = "",
    schedules: Annotated[str, typer.Option(help="Schedules, by commas: row, column.")] = "row,column",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each before the first step.")] = 1024,
    batches: Annotated[int, typer.Option(min=1, help="Batches of the column schedule.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, the ways to decode in turn.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each way in a round.")] = 2,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. Default: all cores.")] = None,
    latency_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds that each transfer takes longer.")] = 0.0,
) -> None:
    """Decode on KV behind an emulated link: what the solver projects beside loading everything, row and column."""
    from headrace.bench.offload import OffloadBench, line

    with one_line_errors():
        chosen = [one_of("schedules", name, ("row", "column")) for name in schedules.split(",")]
        bench = OffloadBench(
            model, [float(rate) for rate in rates.split(",")], [float(share) for share in shares.split(",") if share],
            sequences, context, batches, repeats, steps, threads, latency_ms, chosen,
        )  # fmt: skip
        measure_cases(bench.cases(), json_file, {}, line)


def restart(
    model: Annotated[str, typer.Argument(help="Model folder, 'tiny', or a shape: S1, S2, S3.")] = "S1",
    json_file: JsonFile = None,
    tokens: Annotated[int, typer.Option(min=65, help="Tokens of the prompt.")] = 16_384,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each way to end.")] = 3,
    directory: Annotated[Path | None, typer.Option(help="Where to make the directories. Default: /tmp.")] = None,
    prefault: Annotated[bool, typer.Option(help="Map the pool's memory at the server's start.")] = True,
) -> None:
    """A server ends, by SIGTERM and by kill -9, and starts again: time to first token of the same prompt."""
    from headrace.bench import restart
    from headrace.bench.engine import checkpoint

    with one_line_errors():
        folder = "tiny" if model == "tiny" else str(checkpoint(model))
        options = ["--kv-cache-tokens", str(tokens + 1024), *(["--kv-cache-prefault"] if prefault else [])]
        measure_cases(restart.cases(folder, tokens, repeats, options, directory), json_file)
