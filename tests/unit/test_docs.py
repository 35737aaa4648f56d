"""README, CONTRIBUTING, SECURITY and docs/ say what is so: commands, flags, settings, files, results and links exist.

Every block of commands is preceded by an HTML comment: `run` or `run on` (tests/cpu/test_docs_run.py runs it),
`served` (tests/processes/test_docs_served.py runs it beside a server), `tested by FILES` (tests that run such commands)
or `not run: REASON`. All are parsed here, whatever the comment says.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.cli.main import app
from headrace.config import SETTINGS
from tests.support.docs_pages import ALL_BLOCKS, NOTES, PAGES, ROOT, Block, anchors, links, name, prose, spans

pytestmark = pytest.mark.unit

LANGUAGES = {"bash", "python", "javascript", "text", "json", "yaml"}
FOREIGN = {"curl", "lm_eval", "torchrun", "ray", "export", "echo", "head", ".venv/bin/pre-commit"}
"""Programs of others: that they are named is all that is checked."""

FOREIGN_FLAGS = {"--node-rank", "--nproc-per-node", "--strict"}  # torchrun, mkdocs
MADE_WHEN_RUN = {
    "/openapi.json",
    "build/gpu-check.json",
    "build/gpu-check.tests.failures.txt",
    "build/gpu-check.tests.txt",
    "build/int8.txt",
    "notes.txt",
    "config.json",
    "index.damaged",
    "models.json",
    "modules.json",
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "adapter_config.json",
    "hf_quant_config.json",
    "build/train_tiny/metrics.json",
    "attention.json",
    "failed.txt",
}
"""Files that the text names and no clone has."""

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
PAGE = pytest.mark.parametrize("page", PAGES, ids=name)
ANY_PAGE = pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=name)


@cache
def tracked() -> list[str]:
    """Files of the repository, new ones too."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.splitlines()
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]


@cache
def sources() -> str:
    """All text that could name a setting or a flag of a tool."""
    suffixes = {".py", ".cpp", ".h", ".txt", ".sh", ".cmake"}
    return MAKEFILE + "".join(
        (ROOT / file).read_text() for file in tracked() if Path(file).suffix in suffixes and "tests" not in file
    )


# ---- blocks ----------------------------------------------------------------------------------------------------------


@PAGE
def test_code_is_fenced(page: Path) -> None:
    """An indented block would escape the tests below. (A paragraph of a list is indented likewise, and is none.)"""
    listed, before = False, ""
    for line in prose(page).splitlines():
        if line and not line.startswith(" "):
            listed = bool(re.match(r"[-*]|\d+\.", line))
        assert listed or before or not line.startswith("    "), f"{name(page)}: fence this block: {line}"
        before = line


@pytest.mark.parametrize("block", ALL_BLOCKS, ids=str)
def test_block_says_how_it_is_tested(block: Block) -> None:
    assert block.language in LANGUAGES, f"the block's language is one of {', '.join(sorted(LANGUAGES))}"
    if block.language in {"text", "json", "yaml"}:
        return
    assert block.mark, "the line before the block is <!-- run -->, <!-- tested by FILES --> or <!-- not run: REASON -->"
    for file in re.findall(r"(?:tests/|tools/|\.ci/)[\w./]+", block.before):
        assert (ROOT / file).exists(), f"no such test: {file}"
    if block.mark["tests"]:
        assert re.fullmatch(r"((tests/|tools/|\.ci/)[\w./]+(, )?)+", block.mark["tests"])
    if block.language == "python":
        compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.language == "bash"], ids=str)
def test_commands_exist(block: Block) -> None:
    for command in block.commands():
        check_command(command)


def check_command(command: str) -> None:
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] == "timeout":
        words = words[2:]
    program, *arguments = words
    if program.removeprefix(".venv/bin/") == "headrace":
        check_headrace(arguments)
    elif "headrace.cli.main" in arguments:
        check_headrace(arguments[arguments.index("headrace.cli.main") + 1 :])
    elif program == "make":
        check_make(arguments)
    elif program in {"python", ".venv/bin/python", ".venv-clients/bin/python"}:
        check_python(arguments)
    else:
        assert program in FOREIGN, f"a program that no test knows: {program}"


def check_headrace(arguments: list[str]) -> None:
    """Parses the command as the program would, and stops before it runs."""
    command: Any = typer.main.get_command(app)
    while getattr(command, "commands", None) and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if "--help" not in arguments:
        command.make_context(command.name, list(arguments))


def check_make(arguments: list[str]) -> None:
    for word in arguments:
        variable, is_variable, _ = word.partition("=")
        if is_variable:
            assert re.search(rf"\b{variable}\b", MAKEFILE), f"the Makefile has no {variable}"
        else:
            assert word in TARGETS, f"no such target: make {word}"


def check_python(arguments: list[str]) -> None:
    """A script or a module of ours, and that it knows the flags; other modules must be installable."""
    if arguments[0] == "-m" and arguments[1] in {"pytest", "pip"}:
        return
    file = f"{arguments[1].replace('.', '/')}.py" if arguments[0] == "-m" else arguments[0]
    assert (ROOT / file).is_file(), f"no such file: {file}"
    text = (ROOT / file).read_text()
    for word in arguments[1:]:
        if word == "--":
            break
        assert not word.startswith("--") or f'"{word}"' in text, f"{file} has no {word}"


# ---- names in the text -----------------------------------------------------------------------------------------------


@cache
def flags() -> set[str]:
    """Every option of every command, long and short."""
    found: set[str] = set()
    waiting: list[Any] = [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        found.update(*([*option.opts, *option.secondary_opts] for option in command.params))
    return found | {"--help"}


@PAGE
def test_flags_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span):
            known = flag in flags() | FOREIGN_FLAGS or f'"{flag}"' in sources()
            assert known, f"{name(page)} names {flag}, which no command has"


@PAGE
def test_commands_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        words = span.removeprefix(".venv/bin/").split()
        if words[0] == "make" and len(words) > 1:
            check_make(words[1:])
        if words[0] == "headrace" and len(words) > 1 and words[1][0].islower():
            commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
            assert words[1] in commands, f"{name(page)} names `{span}`"
            if words[1] == "bench" and len(words) > 2 and words[2][0].isalpha():
                assert words[2] in commands["bench"].commands, f"{name(page)} names `{span}`"


@PAGE
def test_settings_exist(page: Path) -> None:
    settings = {item.env for item in SETTINGS.values()}
    for setting in set(re.findall(r"\bHEADRACE_[A-Z0-9_]*[A-Z0-9]\b", page.read_text())):
        assert setting in settings or setting in sources(), f"{name(page)} names {setting}"


@PAGE
def test_files_in_the_text_exist(page: Path) -> None:
    """A path may be that of the repository, or the end of one: `engine/core.py`."""
    for span in spans(page):
        if not re.fullmatch(
            r"[\w./-]+\.(py|h|cpp|md|yml|toml|svg|txt|json|damaged)|(src|tools|tests|docs|csrc|bench)/[\w./]*", span
        ):
            continue
        wanted = span.removeprefix("./").removesuffix("/")
        there = any(f"/{file}".endswith(f"/{wanted}") or f"/{wanted}/" in f"/{file}" for file in tracked())
        result = re.match(r"20\d\d-\d\d-\d\d-", wanted)  # without its folder: the next test looks for it
        assert there or result or wanted in MADE_WHEN_RUN, f"{name(page)} names {span}"


@ANY_PAGE
def test_results_exist(page: Path) -> None:
    for file in set(re.findall(r"20\d\d-\d\d-\d\d-[a-z][\w.*-]*\.json", page.read_text())):
        assert list((ROOT / "bench/results").glob(file)), f"{name(page)} names {file}"


@ANY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        goal = (page.parent / file).resolve() if file else page
        assert goal.exists(), f"{name(page)} links to {link}"
        assert goal.is_relative_to(ROOT), f"{name(page)} links out of the repository: {link}"
        if anchor and goal.suffix == ".md":
            assert anchor in anchors(goal), f"{name(page)} links to {link}"


# ---- what is made ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["summary", "speculation"])
def test_figures_are_those_of_the_results(tool: str) -> None:
    """The tables of docs/performance.md and docs/speculation.md, and the picture in the README."""
    check = [sys.executable, f"tools/performance/{tool}.py", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: make docs")
def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: links, anchors and what pages load (tools/docs/hooks.py)."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/index.html").is_file()


def test_one_request_is_traced_through_ten_files() -> None:
    """docs/trace.md: the numbered walk names ten files at most, and every name in backticks is one of the code's."""
    text = (ROOT / "docs" / "trace.md").read_text()
    walk, _, _ = text.partition("## Beside the ten")
    assert len(re.findall(r"^\d+\. \*\*`[\w/]+\.py`\*\*", walk, re.MULTILINE)) == 10
    words = {word for path in (ROOT / "src").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    names = [name.split("(")[0] for name in re.findall(r"`([A-Za-z_][\w.]*(?:\([^`]*\))?)`", text)]
    assert [name for name in names if not set(name.split(".")) - {"py", "cpp"} <= words] == []
