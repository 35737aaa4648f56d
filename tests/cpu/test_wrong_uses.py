"""What people get wrong: one line, the code, and nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from headrace.cli import main
from tests.support.wrong_uses import WRONG_USES, WrongUse

pytestmark = pytest.mark.cpu

ALL = [pytest.param(use, id=f"{kind}: {use.about}") for kind, uses in WRONG_USES.items() for use in uses]
COMMANDS = typer.main.get_command(main.app)


@pytest.mark.parametrize("use", ALL)
def test_one_line_and_the_code(
    use: WrongUse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("headrace.engine.process.start", started)
    monkeypatch.setattr("headrace.server.serve.bind", started)
    monkeypatch.chdir(tmp_path)
    for name, value in use.env.items():
        monkeypatch.setenv(name, value)
    use.make_files(tmp_path)
    with pytest.raises(SystemExit) as ended:
        COMMANDS.main(use.words, prog_name="headrace")
    out, err = capsys.readouterr()
    assert ended.value.code == use.code, err
    assert len(err.splitlines()) == 1 and err.startswith("headrace: ") and not out
    assert use.told in err


def test_there_are_fifty_of_them() -> None:
    assert len(ALL) >= 50
