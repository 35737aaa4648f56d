"""Help texts: whole screens (tests/unit/golden), what --help leaves out, and that nothing is cut."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import typer

from headrace.cli.help import COMMON_PANEL, PanelledCommand, RarePanel, summary
from headrace.cli.main import app
from headrace.config import SETTINGS
from tools import golden
from tools.golden import FOLDER, SCREENS

pytestmark = pytest.mark.unit

GROUP: Any = typer.main.get_command(app)
GROUPS = ("bench", "keys", "cache")
COMMANDS = [
    *(name for name in GROUP.commands if name not in GROUPS),
    *(f"{group} {name}" for group in GROUPS for name in GROUP.commands[group].commands),
]
WITHOUT_A_MODEL = (
    "demo",
    "bench serve",
    "bench attention",
    "bench connections",
    "keys new",
    "cache ls",
    "cache verify",
)
COMMAND = pytest.mark.parametrize("command", COMMANDS)
screen = cache(golden.screen)


def made(command: str) -> Any:
    group, _, name = command.rpartition(" ")
    return (GROUP.commands[group] if group else GROUP).commands[name]


@pytest.mark.parametrize("name", SCREENS)
def test_screens_are_as_before(name: str) -> None:
    """Where a text is meant to change: `python tools/golden.py`, and look at the difference."""
    assert screen(*SCREENS[name]) == (FOLDER / name).read_text()


def test_no_screen_is_left_over() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(SCREENS)


@COMMAND
def test_help_fits_the_terminal_and_is_plain(command: str) -> None:
    for width in (60, 80):
        text = screen(command, width, "--help-all")
        assert text.isascii() and "\x1b" not in text and text.startswith("Usage: headrace ")
        assert max(map(len, text.splitlines())) <= width
        assert "{" not in text.splitlines()[0], "typer's braces around arguments"


@pytest.mark.parametrize("group", ["", *GROUPS])
def test_summaries_are_whole_sentences_of_one_line(group: str) -> None:
    commands: dict[str, Any] = (GROUP.commands[group] if group else GROUP).commands
    lines = screen(group, 80).splitlines()
    for name, command in commands.items():
        assert f"  {name.ljust(max(map(len, commands)))}  {summary(command.help)}" in lines


@COMMAND
def test_every_command_has_panels_and_help_all(command: str) -> None:
    assert isinstance(made(command), PanelledCommand)
    text, whole = screen(command, 80), screen(command, 80, "--help-all")
    rare = [param.opts[0] for param in made(command).params if isinstance(param.rich_help_panel, RarePanel)]
    assert not any(f"  {flag} " in text for flag in rare) and all(f"  {flag} " in whole for flag in rare)
    assert ("--help-all  Show" in text) == (f"See headrace {command} --help-all" in text) == bool(rare)
    assert "Not shown" not in whole


@COMMAND
def test_a_model_is_given_the_same_way_everywhere(command: str) -> None:
    """As -m and --model; first as well, unless the arguments are prompts, files or lists of shapes."""
    found = {param.name: param.opts for param in made(command).params}
    named = found.get("model") or found.get("models")
    assert (command in WITHOUT_A_MODEL) == (named is None)
    assert named is None or {"-m", "--model"} <= set(named)
    other = command in ("generate", "batch", "why", "bench engine", "bench restore")
    assert named is None or ("model_first" in found) != other


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_ten_options_come_first(command: str) -> None:
    common = [param for param in made(command).params if getattr(param, "rich_help_panel", None) == COMMON_PANEL]
    assert len(common) <= 10
    headings = [line for line in screen(command, 80).splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:2] == ["Arguments:", COMMON_PANEL + ":"] and headings[-1] == "Help:"


def test_help_all_of_a_group_is_its_help() -> None:
    for group in ("", "bench"):
        assert screen(group, 80, "--help-all") == screen(group, 80)


def test_help_all_of_serve_has_every_setting_with_its_twin() -> None:
    text = screen("serve", 80, "--help-all")
    for item in SETTINGS.values():
        assert item.flag in text and f"env var: {item.env}" in " ".join(text.split())
    assert "HEADRACE" not in screen("serve", 80)


def test_without_a_server_max_connections_is_taken_and_not_shown() -> None:
    for command in ("chat", "generate"):
        assert "max-connections" not in screen(command, 80, "--help-all")
        assert any("--max-connections" in param.opts for param in made(command).params)
        assert "Log and engine process:" in screen(command, 80, "--help-all")
    assert "--max-connections" in screen("serve", 80)


def test_a_break_falls_into_no_flag() -> None:
    for width in range(80, 121, 5):
        lines = screen("serve", width, "--help-all").splitlines()
        assert not [line for line in lines if re.search(r"--[a-z-]*-$|(default|var):$", line)]
