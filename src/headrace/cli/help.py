"""Help texts: options in panels, those that most people need first; rare ones by --help-all; summaries never cut.

typer's own panels are tables, which cut the names of flags off on narrow terminals.
"""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMON_PANEL = "Options that most people need"
OWN_PANEL = "Input and output"
SAMPLING_PANEL = "Sampling"
SHAPE_PANEL = "Shape of the answer"
HELP_PANEL = "Help"
USUAL_PANEL = "Options"
WIDEST = 120
"""Columns; wider terminals get lines of this length."""

EVERYTHING = "headrace.help_all"
EXTRA = re.compile(r"(?:^|  )\[([^\[\]]*)\]$")
"""What click adds to a help text: '[env var: HEADRACE_PORT; default: 8000]'."""


UNBROKEN = re.compile(r"--[a-z][a-z-]*|(?<=[\[ ])(?:default|env var): [^;\]]*")
GLUED, LOOSE = str.maketrans("- ", "\u2011\xa0"), str.maketrans("\u2011\xa0", "- ")
"""A hyphen and a space at which no line is broken, and back."""


class RarePanel(str):
    """The panel of an option that only --help-all shows."""

    __slots__ = ()


def panel(name: str, rare: bool) -> str:
    return RarePanel(name) if rare else name


def _show_everything(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[EVERYTHING] = True
        typer.echo(context.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            help="Show rare options and the environment's variables, too.",
            callback=_show_everything,
            is_eager=True,
            rich_help_panel=HELP_PANEL,
        ),
    ],
)
"""A parameter of every command; its callback has done everything."""


HELP_ALL_OF_GROUP = typer.Option("--help-all", callback=_show_everything, is_eager=True, hidden=True)
"""Groups have nothing to hide, but who asks gets an answer."""


MOST_VALUES = 56
"""Characters of an option with its values."""


class PanelledCommand(TyperCommand):
    """A command whose --help lists options under headings: COMMON_PANEL first, HELP_PANEL last, between them by first
    appearance. Where there are rare ones these and the variables of the environment are left out, as the last line
    tells."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.context_settings.setdefault("max_content_width", WIDEST)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Without the braces that typer puts around a name of arguments that are required."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rare = any(map(_rare, self.params))
        everything = not rare or EVERYTHING in ctx.meta
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            told = param.get_help_record(ctx)
            if told is not None and (everything or not _rare(param)) and (param.name != "help_all" or rare):
                name = told[0] if param.opts[0].startswith("-") else told[0].partition(" <")[0]  # says its type, too
                row = _many_values(name, _text(told[1], everything))
                panels.setdefault(_panel_of(param), []).append(row)
        for heading in sorted(panels, key=_place):
            _write(formatter, heading, panels[heading])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        rare = sum(map(_rare, self.params))
        if rare and EVERYTHING not in ctx.meta:
            twins = any(getattr(param, "envvar", None) for param in self.params)
            told = f"{rare} rare and experimental options" + (", and the environment's variables" if twins else "")
            formatter.write_paragraph()
            formatter.write_text(f"Not shown: {told}. See {ctx.command_path} --help-all")


class PanelledGroup(TyperGroup):
    """Commands, whose `rich_help_panel` names their heading, each with all of its first sentence; then options."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.context_settings.setdefault("max_content_width", WIDEST)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from headrace.cli.hints import names_a_model

        if ctx.parent is None and args[0] not in self.commands and names_a_model(args[0]):
            ctx.fail(f"{args[0]} is a model: headrace chat {args[0]}, or another command before it")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        rows = [told for param in self.get_params(ctx) if (told := param.get_help_record(ctx)) is not None]
        _write(formatter, USUAL_PANEL, [(flags, _text(text, True)) for flags, text in rows])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        names = self.list_commands(ctx)
        for name in names:
            command: Any = self.get_command(ctx, name)
            row = (name.ljust(max(map(len, names))), summary(command.help or ""))
            panels.setdefault(_panel_of(command, "Commands"), []).append(row)
        for heading, rows in panels.items():
            _write(formatter, heading, rows)


def _many_values(name: str, text: str) -> tuple[str, str]:
    """A row of an option and its help; values too many for the first column stand in the second."""
    flag, _, values = name.rpartition(" ")
    if len(name) <= MOST_VALUES or "|" not in values:
        return name, text
    return f"{flag} NAME", f"{text} NAME: {values.replace('|', ', ')}."


def _write(formatter: Any, heading: str, rows: list[tuple[str, str]]) -> None:
    """A section, with no break inside a flag or a default."""
    kept = [(name, UNBROKEN.sub(lambda found: found[0].translate(GLUED), text)) for name, text in rows]
    before = len(formatter.buffer)
    with formatter.section(heading):
        formatter.write_dl(kept)
    formatter.buffer[before:] = [text.translate(LOOSE) for text in formatter.buffer[before:]]


def summary(help: str) -> str:
    """The first sentence."""
    first = " ".join(inspect.cleandoc(help).partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", first, maxsplit=1)[0]


def _rare(param: Any) -> bool:
    return isinstance(getattr(param, "rich_help_panel", None), RarePanel)


def _panel_of(item: Any, usual: str = USUAL_PANEL) -> str:
    if item.name == "help":
        return HELP_PANEL
    named = getattr(item, "rich_help_panel", None)
    return str(named) if named else "Arguments" if getattr(item, "param_type_name", "") == "argument" else usual


def _place(panel: str) -> int:
    first = ("Arguments", COMMON_PANEL)
    return first.index(panel) - 2 if panel in first else int(panel == HELP_PANEL)


def _text(help: str, everything: bool) -> str:
    """The help of an option with what click adds: without the environment's variable unless everything is shown."""
    found = EXTRA.search(help)
    if found is None:
        return help
    parts = [re.sub(r"^default: \((.*)\)$", r"default: \1", part) for part in found[1].split("; ")]
    kept = [part for part in parts if everything or not part.startswith("env var: ")]
    return f"{help[: found.start()]}  [{'; '.join(kept)}]".strip() if kept else help[: found.start()]
