"""The command line: options from the settings, one clear line for an error, and each command once for real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from headrace.assets.facts import filler
from headrace.cli import main, options
from headrace.cli.hints import check_file
from headrace.config import SETTINGS, EngineConfig
from headrace.engine.capacity import SHIPPED
from headrace.server.state import MakeEngine

pytestmark = pytest.mark.cpu

OF_BATCH = {"served_model_name"}
"""A setting of servers that `headrace batch` has too."""

SMALL = ("--kv-cache-tokens", "16384", "--threads", "1")


def run(*arguments: str, stdin: str | None = None, **env: str) -> Result:
    return CliRunner().invoke(main.app, arguments, input=stdin, env=env)


def headrace(
    *arguments: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-m", "headrace.cli.main", *arguments]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )


def check_error(ran: Any, code: int, *words: str) -> None:
    stderr = ran.stderr.strip()
    returned = ran.exit_code if isinstance(ran, Result) else ran.returncode
    assert returned == code, (ran.stdout, stderr)
    assert "Traceback" not in stderr and stderr.splitlines()[-1].startswith("headrace: ")
    for word in words:
        assert word in stderr


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The settings with which `serve` would run."""
    seen: list[EngineConfig] = []

    def fake(config: EngineConfig, make_engine: MakeEngine) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("headrace.server.serve.serve", fake)
    monkeypatch.setattr("headrace.engine.process.EngineStart", Mock)
    monkeypatch.setattr("headrace.engine.preflight.check", lambda config: None)
    return seen


def test_serve_has_every_setting_with_its_environment_twin() -> None:
    text = " ".join(run("serve", "--help-all").output.split())
    for item in SETTINGS.values():
        assert item.env == f"HEADRACE_{item.name.upper()}" and item.env in text
        assert item.name == "model" or f"--{item.name.replace('_', '-')}" in text
        for alias in item.aliases:
            assert alias in text


def test_commands_without_a_server_have_no_server_settings() -> None:
    for command in ("generate", "batch", "chat"):
        text = run(command, "--help").output
        assert "--kv-cache-tokens" in text and ("--temperature" in text) == (command != "batch")
        assert not any(f"--{name.replace('_', '-')}" in text for name in options.SERVER_ONLY - OF_BATCH)
        assert "--api-key" not in text and "--port" not in text


def test_flag_before_environment_before_default(served: list[EngineConfig]) -> None:
    env = {"HEADRACE_PORT": "1234", "HEADRACE_MAX_SEQUENCES": "7", "HEADRACE_MODEL": "other"}
    assert run("serve", **env).exit_code == 0
    assert run("serve", "mine", "--port", "99", "--max-num-seqs", "3", **env).exit_code == 0
    assert run("serve", "--no-enable-prefix-caching", "--dtype", "float32").exit_code == 0
    assert run("serve", "-m", "mine", **env).exit_code == run("serve", "mine", "--model", "mine").exit_code == 0
    assert [(c.model.folder, c.server.port, c.scheduler.max_sequences) for c in served[:2]] == [
        ("other", 1234, 7),
        ("mine", 99, 3),
    ]
    assert [c.model.folder for c in served[3:]] == ["mine", "mine"]
    assert served[2] == EngineConfig(enable_prefix_caching=False, dtype="float32", log_level="info")


def test_ranks_have_short_flags(served: list[EngineConfig]) -> None:
    assert run("serve", "-cp", "3", "-tp", "2").exit_code == 0
    assert (served[0].ranks.context, served[0].ranks.tensor) == (3, 2)


def test_exit_code_of_the_server_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Mock()
    monkeypatch.setattr("headrace.engine.process.EngineStart", lambda: begun)
    monkeypatch.setattr("headrace.server.serve.serve", lambda config, make_engine: 3)
    assert run("serve").exit_code == 3
    begun.close.assert_called_once_with()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "many"], ["--port"]),
        (["serve", "--port", "70000"], ["port", "65535"]),
        (["serve", "--dtype", "int3"], ["--dtype"]),
        (["serve", "--kv-cache-dtype", "int4"], ["--kv-cache-dtype", "int8"]),
        (["serve", "--kv-cache-tokens", "3"], ["kv_cache_tokens", "64"]),
        (["serve", "--no-such-flag"], ["--no-such-flag"]),
        (["generate", "hi", "--temperature", "-1"], ["temperature"]),
        (["generate", "hi", "--temperature", "nan"], ["temperature"]),
        (["generate", "hi", "--file", "x"], ["--file"]),
        (["generate", "--file", "/no/such/file"], ["/no/such/file"]),
        (["generate", ""], ["empty"]),
        (["batch", "/no/such/file", "-"], ["/no/such/file"]),
        (["chat", "--system", "x", "--system-file", "y"], ["--system-file"]),
        (["demo", "--requests", "0"], ["--requests"]),
        (["doctor", "--model", "/no/such/model"], ["/no/such/model"]),
        (["doctor", "/no/such/model"], ["/no/such/model"]),
        (["serve", "mine", "-m", "other"], ["two models", "mine", "other"]),
        (["tiny"], ["tiny is a model: headrace chat tiny"]),
        (["tinny"], ["no such command"]),
        (["generate", "tiny"], ["generate takes prompts: give the model as -m tiny and a text to continue"]),
        (["generate", "tiny", "hi"], ["generate takes prompts: give the model as -m tiny"]),
        (["generate", str(SHIPPED["tiny"]), "hi"], ["-m /"]),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], words: list[str]) -> None:
    check_error(run(*arguments), 2, *words)


@pytest.mark.parametrize(
    ("name", "text"), [("x.jsonl", "In the beginning\n"), ("x.txt", '{"prompt": "a"}\n\n {"prompt": "b"}\n')]
)
def test_generate_sends_files_of_requests_to_batch(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    ran = run("generate", "-f", str(file))
    check_error(ran, 2, f"headrace batch {file} OUT.jsonl")
    assert len(ran.stderr.splitlines()) == 1


def test_a_file_with_one_object_is_a_prompt(tmp_path: Path) -> None:
    for text in ('{"prompt": "a"}\n', '{"a": 1}\n[2]\n', "{\n}\n", ""):
        check_file(tmp_path / "x.json", text)


def test_environment_twin_is_checked_as_well() -> None:
    check_error(run("serve", HEADRACE_MAX_QUEUED_REQUESTS="none"), 2, "MAX_QUEUED_REQUESTS")


def test_debug_shows_the_traceback() -> None:
    ran = run("--debug", "serve", "--port", "70000")
    assert isinstance(ran.exception, ValueError)


def test_help_does_not_import_torch() -> None:
    code = "import sys, headrace.cli.main; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version() -> None:
    assert run("--version").output.startswith("headrace 0.")


# ---- the commands, for real ------------------------------------------------------------------------------------------


def test_serve_tells_of_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check_error(run("serve", "--port", port), 1, port)


def test_serve_refuses_an_unknown_model() -> None:
    ran = headrace("serve", "/no/such/model", "--port", "0")
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1 and "/no/such/model" in ran.stderr


def test_sigterm_while_loading_is_a_clean_end() -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "tiny", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None and "loading tiny" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_empty_key_is_refused() -> None:
    check_error(run("serve", "--api-key", " ", "--port", "0"), 2, "api_key")


def test_generate_from_pipe_and_arguments() -> None:
    piped = run("generate", "--max-tokens", "8", *SMALL, stdin="And God said\n")
    assert piped.exit_code == 0, piped.stderr
    assert piped.stdout.strip() and "prompt" in piped.stderr and "tokens/s" in piped.stderr
    dashed = run("generate", "-m", "tiny", "-", "--max-tokens", "8", *SMALL, stdin="And God said\n")
    assert dashed.stdout == piped.stdout
    several = run("generate", "-m", "tiny", "And God said", "In the", "--max-tokens", "8", "--json", *SMALL)
    assert several.stderr.splitlines()[-1].startswith("answered 2 prompts in ") and "\x1b" not in several.stderr
    rows = [json.loads(line) for line in several.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["And God said", "In the"]
    assert rows[0]["text"].strip() == piped.stdout.strip() and rows[0]["output_tokens"] == 8


@pytest.mark.parametrize("arguments", [("--version",), ("info", "--help"), ("doctor", "--json")])
def test_without_a_reader_a_command_ends_and_says_nothing(arguments: tuple[str, ...]) -> None:
    """As of `headrace doctor | head -1`; 141 is what shells tell of one that SIGPIPE ended."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as nobody:
        ran = headrace(*arguments, stdout=nobody)
    assert ran.returncode == 141 and "headrace:" not in ran.stderr and "Exception" not in ran.stderr


def test_work_goes_on_without_a_reader_of_its_progress() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as nobody:
        ran = headrace("generate", "-m", "tiny", "The code of", "--max-tokens", "2", *SMALL, stderr=nobody)
    assert ran.returncode == 0 and ran.stdout.strip()


def test_closed_streams_are_empty_ones() -> None:
    """`>&-`: the engine's process has none either."""
    script, words = Path(sys.executable).with_name("headrace"), ["generate", "--max-tokens", "2", *SMALL]
    for closed, given, code, told in (
        ("<&- >&-", [*words, "Hello"], 0, "prompt "),
        ("<&-", words, 2, "the prompt is empty"),
        (">&-", ["info", "tiny"], 0, ""),
    ):
        ran = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", script, *given], capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == code and told in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


def test_the_mark_of_an_editor_is_no_part_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfHello\r\n")
    asked = Mock()
    monkeypatch.setattr("headrace.cli.generate.run", asked)
    for more, given in ((["-f", str(tmp_path / "p.txt")], None), ([], "\ufeffHello\n")):
        assert run("generate", *SMALL, *more, stdin=given).exit_code == 0
    assert [call.args[2] for call in asked.call_args_list] == [["Hello"], ["Hello"]]


def test_a_text_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.generate.LONGEST", 1000)
    check_error(run("generate", "-f", "/dev/zero", *SMALL), 2, "/dev/zero has more than 1,000 characters")
    check_error(run("generate", *SMALL, stdin="x" * 1001), 2, "standard input has more than 1,000 characters")
    check_error(run("chat", "tiny", "--system-file", "/dev/zero", *SMALL, stdin=""), 2, "/dev/zero has more than")


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a process that is lost."""

    def lost(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("headrace.cli.doctor.run", lost)
    check_error(run("doctor"), 1, "Broken pipe")


def test_batch_from_a_pipe() -> None:
    notes = {"role": "system", "content": "The code of Lisbon is 4821. The code of Paris is 9035.\n"}
    lines = [
        {"custom_id": name, "url": "/v1/chat/completions", "body": {"messages": messages, "temperature": 0, **more}}
        for name, more in (("one", {"max_tokens": 16}), ("refused", {"max_tokens": -1}))
        for messages in [[notes, {"role": "user", "content": "What is the code of Lisbon?"}]]
    ]
    ran = run("batch", "-", "-", *SMALL, stdin="\n".join(map(json.dumps, lines)))
    assert ran.exit_code == 0, ran.stderr
    rows = {row["custom_id"]: row["response"] for row in map(json.loads, ran.stdout.splitlines())}
    assert rows["one"]["body"]["choices"][0]["message"]["content"] == "The code of Lisbon is 4821."
    assert rows["refused"]["status_code"] == 400
    assert "answered 1 of 2 prompts in " in ran.stderr and "1 of 2 refused: line 2 (custom_id 'refused')" in ran.stderr


def test_chat_from_a_pipe(tmp_path: Path) -> None:
    turns = "What is the code of Lisbon?\n\n/reset\nWhat is the code of Lisbon?\n/stats\n/exit\nnever asked\n"
    notes = tmp_path / "notes.txt"
    notes.write_text(f"{filler()[:2000]} The code of Lisbon is 4821. The code of Paris is 9035.\n")
    ran = run("chat", "tiny", "--system-file", str(notes), "--max-tokens", "16", *SMALL, stdin=turns)
    assert ran.exit_code == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first == second == "The code of Lisbon is 4821."
    assert ran.stderr.count("tokens/s") == 3 and "(0 cached, " in ran.stderr and "(576 cached, " in ran.stderr
    assert "turns: 1 (2 with earlier conversations)" in ran.stderr and "of 16,384 tokens in use" in ran.stderr


def test_chat_without_a_template_is_refused_before_the_first_turn(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(SHIPPED["tiny"], folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    ran = run("chat", str(folder), *SMALL, stdin="")
    check_error(ran, 2, "the model has no chat template, so it cannot take messages")


def test_doctor() -> None:
    ran = run("doctor", "--json", "--model", "tiny")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["memory"]["read bandwidth GB/s"] > 0.1
    assert found["kernels"]["linear"] and found["processor"]["cores usable"] >= 1
    assert "available" in found["kernels"]["Triton kernels"]
    assert found["model"]["context tokens"] == "16,384"
    assert found["ranks"]["by the environment's settings"] == "1 rank, no links"
    assert "gloo" in found["ranks"]["backends"] and "lo (127.0.0.1)" in found["ranks"]["interfaces"]
    several = json.loads(run("doctor", "--json", HEADRACE_CONTEXT_PARALLEL_SIZE="3").stdout)["ranks"]
    assert several["by the environment's settings"].startswith(
        "3 ranks (3 context x 1 tensor) started by mp, gloo on lo"
    )


def test_demo_ends_well() -> None:
    ran = run("demo", "--requests", "8", "--system-tokens", "600", HEADRACE_API_KEY="of another server")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.count("What is the code of") == 8
    for row in ("first token, cold", "prompt tokens from the cache", "KV memory if none were shared"):
        assert row in ran.stdout


def test_demo_fails_when_the_server_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.bench.demo.MODEL", "/no/such/model")
    check_error(run("demo"), 1, "the server ended with 2", "/no/such/model")


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "headrace.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from headrace.cli.entry import main
sys.argv = ["headrace", "--version"]
main()
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_commands_are_imported_says_nothing(ignored: bool) -> None:
    """Behind nohup it is no end."""
    handled = signal.SIG_IGN if ignored else signal.SIG_DFL
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handled),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0 if ignored else -signal.SIGINT, "")
    assert done.stdout.startswith("headrace ") == ignored
