"""`headrace`: the commands and what they share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from headrace import __version__, console
from headrace.cli import bench
from headrace.cli.options import guarded, with_config, with_sampling
from headrace.config import EngineConfig
from headrace.parallel.torchrun_environment import started_this
from headrace.types import SamplingParams

log = logging.getLogger("headrace")

app = typer.Typer(
    name="headrace",
    help="An LLM inference engine built around the KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: tables cut flag names off on narrow terminals
)


def _version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def shared(
    debug: Annotated[bool, typer.Option(help="Show the whole traceback of an error.", envvar="HEADRACE_DEBUG")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
) -> None:
    console.set_debug(debug)


def serve(config: EngineConfig) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    Ends with 0 after ctrl-c or SIGTERM, with 1 after a failure, with 2 for settings or a model that cannot work.
    """
    from headrace.server.serve import serve as run

    console.log_to_stderr()
    if config.restart and started_this():
        log.info("torchrun started the ranks, and they cannot be started again from here: --no-restart holds")
        config.restart = False
    code = run(config)
    if code:
        raise typer.Exit(code)


def generate(
    config: EngineConfig,
    params: SamplingParams,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Texts to continue. Default: what comes on standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file that holds one prompt.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, with token counts.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no figures on stderr.")] = False,
) -> None:
    """Continue texts. The text goes to stdout, the figures to stderr."""
    from headrace.cli.generate import read_prompts, run

    run(config, params, read_prompts(prompts or [], file), json_lines=json_lines, quiet=quiet)


def chat(
    config: EngineConfig,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    system_file: Annotated[Path | None, typer.Option(help="File that holds the system prompt.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no figures on stderr.")] = False,
) -> None:
    """Talk with a model. Lines on a piped standard input are the user's turns.

    /reset forgets the conversation, /exit (or end of input) leaves; ctrl-c stops an answer.
    """
    from headrace.cli.chat import run

    run(config, params, system, system_file, quiet=quiet)


def doctor(
    model: Annotated[str | None, typer.Option(help="Also check this model: a folder, or 'tiny'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """What this machine offers: processor, memory and its bandwidth, kernels and why not, accelerators."""
    from headrace.cli.doctor import run

    run(model, as_json)


def demo(
    requests: Annotated[int, typer.Option(help="How many chat requests share the system prompt.", min=1)] = 32,
    system_tokens: Annotated[int, typer.Option(help="Length of the system prompt, about.", min=200)] = 1500,
    seed: Annotated[int, typer.Option(help="Draws the document and the questions.")] = 1,
) -> None:
    """Start a server on the shipped model, ask many questions over one document, show what the cache saved."""
    from headrace.cli.demo import run

    run(requests, system_tokens, seed)


def tune(
    model: Annotated[str, typer.Argument(help="Model folder, 'tiny', or a shape with random weights: S1, S2, S3.")],
    path: Annotated[Path, typer.Option("--out", help="The table; what it holds already is kept and gone on with.")],
    ranks: Annotated[
        int, typer.Option("--ranks", "--context-parallel-size", "-cp", help="Context ranks to tune for.")
    ] = 2,
    tokens: Annotated[
        str, typer.Option(help="Lengths of prompts to search at, by commas; between them shares are interpolated.")
    ] = "2048,8192,16384",
    repeats: Annotated[int, typer.Option(min=1, help="Prefills of each point, of which the median counts.")] = 2,
    stride: Annotated[int, typer.Option(help="Tokens between two bounds that are tried.")] = 64,
    heuristic: Annotated[bool, typer.Option(help="Also fit h(T, P), for --strategy-rule heuristic.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each rank, as the engine will have. Default: its part.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Compute type, as the engine will have: bfloat16, float32, auto.")
    ] = "auto",
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s to limit each link to, for experiments; the engine refuses the table.")
    ] = None,
    latency_ms: Annotated[float, typer.Option(help="Milliseconds that each message takes longer, likewise.")] = 0.0,
) -> None:
    """Search the partitions of long prompts on this machine and write a table for --parallel-table.

    Interrupted, the same command goes on where it was.
    """
    from headrace.bench import prefill
    from headrace.bench.prefill_links import Link
    from headrace.cli import tune as tuning

    tuning.run(
        tuning.Tuning(
            model, path, ranks, prefill.numbers("tokens", tokens), repeats, stride, threads, dtype, heuristic,
            Link(bandwidth, latency_ms / 1e3),
        )
    )  # fmt: skip


COMMANDS = (
    with_config(serve, server=True, model_argument=True),
    with_config(with_sampling(chat, temperature=0.0, max_tokens=None), server=False, model_argument=True),
    with_config(with_sampling(generate, temperature=0.0, max_tokens=128), server=False, model_argument=False),
    doctor,
    demo,
    tune,
)
for command in COMMANDS:
    app.command()(guarded(command))
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
