"""`headrace`: the commands and what they share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from headrace import console
from headrace.bench.tuning import Tuning
from headrace.cli import bench, errors
from headrace.cli.options import PanelledCommand, guarded, with_config, with_sampling
from headrace.config import EngineConfig
from headrace.parallel.torchrun_environment import started_this
from headrace.types import SamplingParams
from headrace.version import __version__

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
    errors.set_debug(debug)


def serve(config: EngineConfig) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    Ends with 0 after ctrl-c or SIGTERM, with 1 after a failure, with 2 for settings or a model that cannot work.
    """
    from headrace.server.serve import serve as run

    if config.server.restart and started_this():
        log.info("torchrun started the ranks, and they cannot be started again from here: --no-restart holds")
        config = config.replace(restart=False)
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
    from headrace.bench.demo import run

    run(requests, system_tokens, seed)


def tune(tuning: Tuning) -> None:
    from headrace.bench.tune import run

    run(tuning)


COMMANDS = (
    with_config(serve, server=True, model_argument=True),
    with_config(with_sampling(chat, temperature=0.0, max_tokens=None), server=False, model_argument=True),
    with_config(with_sampling(generate, temperature=0.0, max_tokens=128), server=False, model_argument=False),
    doctor,
    demo,
)
for command in COMMANDS:
    app.command(cls=PanelledCommand)(guarded(command))
app.command()(bench.command_of(Tuning, "tune", tune))
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
