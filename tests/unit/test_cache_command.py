"""`headrace cache`: what a directory holds, removing some of it, and finding what is bad, beside an open tier."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from headrace.cli import cache, main
from headrace.cli.cache_listing import ago, listing, show
from headrace.offload import frame
from headrace.offload.frame import BlobLayout
from headrace.offload.tiers import upkeep
from headrace.offload.tiers.base import name_of
from headrace.offload.tiers.disk import DiskTier
from headrace.offload.tiers.files import tenant_mark
from headrace.offload.tiers.notes import ModelNote, read_notes, write_note
from tests.support.tier_directory import files

pytestmark = pytest.mark.unit

TINY, OTHER = bytes(32), bytes([7] * 32)
NOTE = ModelNote("/models/tiny-2/", "/models/tiny-2", "bfloat16", "int8", "none", "raw", 1 << 20, "0.1.0")
OLD_NS = 8 * 86400 * 10**9


def blob(number: int, identity: bytes = TINY, kind: Any = "k") -> tuple[bytes, bytes]:
    """(Name, content)."""
    digest, sections = bytes([number] * 32), [bytes([number, layer] * 32) for layer in range(2)]
    layout = BlobLayout(identity, 2, 64, kind, "raw")
    header = frame.make_header(layout, digest, [frame.checksum(section) for section in sections])
    return name_of(digest, kind), header + b"".join(sections)


SIZE = len(blob(0)[1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three chunks of a model with a note, one with its activations and one of a tenant; and one chunk of another
    model, last used eight days ago."""
    root = tmp_path / "kv"
    tier = DiskTier(root, 1 << 20)
    for number, tenant, kind in ((1, b"", "k"), (1, b"", "x"), (2, b"", "k"), (3, b"acme", "k")):
        name, data = blob(number, kind=kind)
        assert tier.put(name, tenant, [data])
    name, data = blob(4, OTHER)
    assert tier.put(name, b"", [data])
    used = time.time_ns() - OLD_NS
    tier._index._db.execute("UPDATE blobs SET used = ? WHERE name = ?", (used, name))
    tier.close()
    write_note(root, TINY, NOTE)
    return root


def run(*arguments: str, root: Path | None, code: int = 0, stdin: str | None = None) -> Result:
    where = () if root is None else ("--path", str(root))
    ran = CliRunner().invoke(main.app, ("cache", *arguments, *where), input=stdin)
    assert ran.exit_code == code, (ran.stdout, ran.stderr)
    return ran


def left(root: Path) -> set[int]:
    tier = DiskTier(root, 1 << 20)
    assert {entry.name for entry in tier._index.entries()} == set(files(root))
    tier._index.check()
    tier.close()
    return {name[0] for name in files(root)}


def test_ls(root: Path) -> None:
    lines = run("ls", root=root).stdout.splitlines()
    assert lines[0] == f"{root}: 0.0 MiB of 1.0 MiB"
    assert lines[1].split() == ["model", "types,", "tenants", "chunks", "tokens", "size", "last", "use", "id"]
    assert lines[2].split()[:7] == ["tiny-2", "bf16,", "KV", "int8,", "raw", "3", "192"]
    assert lines[2].endswith("00000000")
    assert lines[3].split()[:4] == ["no", "tenant", "2", "128"]
    assert lines[4].split()[0] == tenant_mark(b"acme").hex()
    assert lines[5].split()[:3] == ["?", "1", "64"] and lines[5].endswith("8 d ago   07070707") and len(lines) == 6


def test_ls_as_json(root: Path) -> None:
    told = json.loads(run("ls", "--json", root=root).stdout)
    assert (told["bytes"], told["budget_bytes"]) == (5 * SIZE, 1 << 20)
    tiny, other = told["models"]
    assert (tiny["model"], tiny["folder"], tiny["kv_dtype"], tiny["tokens"]) == ("tiny-2", NOTE.folder, "int8", 192)
    assert [(t["tenant"], t["chunks"]) for t in tiny["tenants"]] == [(None, 2), (tenant_mark(b"acme").hex(), 1)]
    assert other["id"] == OTHER.hex() and other["last_use"] < tiny["last_use"] and "folder" not in other


def test_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "none"))
    for path in ("", "none", "auto"):
        monkeypatch.setenv("HEADRACE_KV_OFFLOAD_PATH", path)
        assert run("ls", root=None).stdout == f"{tmp_path}/none/kv: nothing\n"
    assert run("verify", root=None).stdout.endswith("0 blobs, all sound\n")
    assert "nothing to remove" in run("rm", "--all", root=None).stdout
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("HEADRACE_KV_OFFLOAD_PATH", str(tmp_path))
    (tmp_path / "letters.txt").write_text("mine")
    assert "holds no KV of Headrace" in run("rm", "--all", "--yes", root=None, code=2).stderr
    assert "is no directory" in run("ls", root=tmp_path / "letters.txt", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [(["tiny-2"], {4}), (["/models/tiny-2"], {4}), (["07070707"], {1, 2, 3}), (["--older-than", "7d"], {1, 2, 3}),
     (["--older-than", "9d"], {1, 2, 3, 4}), (["tiny-2", "--older-than", "1w"], {1, 2, 3, 4}), (["--all"], set())],
)  # fmt: skip
def test_rm(arguments: list[str], kept: set[int], root: Path) -> None:
    tier = DiskTier(root, 1 << 20)
    run("rm", *arguments, "--yes", root=root)
    there = tier.has([blob(number)[0] for number in (1, 2, 3)] + [blob(4, OTHER)[0]])
    assert {number for number, yes in zip((1, 2, 3, 4), there, strict=True) if yes} == kept, "a server beside it knows"
    assert tier.put(blob(9)[0], b"", [blob(9)[1]])
    tier.close()
    assert left(root) == kept | {9} and bool(read_notes(root)) == bool(kept)


def test_rm_asks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--yes removes without asking" in run("rm", "--all", root=root, code=2).stderr
    monkeypatch.setattr("headrace.cli.cache._terminal", lambda: True)
    assert "Remove 5 blobs" in run("rm", "--all", root=root, code=1, stdin="n\n").stderr
    assert left(root) == {1, 2, 3, 4}
    assert "removed 4 blobs" in run("rm", "tiny-2", root=root, stdin="y\n").stdout and left(root) == {4}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [([], "say what to remove"), (["tiny-2", "--all"], "not both"), (["huge"], "it holds tiny-2, 07070707"),
     (["--older-than", "a week"], "--older-than must be a number with s, m, h, d or w"),
     (["0707"], "holds nothing of")],
)  # fmt: skip
def test_rm_refuses(arguments: list[str], told: str, root: Path) -> None:
    assert told in run("rm", *arguments, root=root, code=2).stderr and len(files(root)) == 5


def flip(root: Path, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def cut(root: Path, path: Path) -> None:
    os.truncate(path, SIZE - 1)


def renamed(root: Path, path: Path) -> None:
    """Another chunk's content under this name."""
    path.write_bytes(blob(1)[1])


def lost(root: Path, path: Path) -> None:
    path.unlink()


def stray(root: Path, path: Path) -> None:
    """A file that the index has lost."""
    tier = DiskTier(root, 1 << 20)
    tier._index.remove([blob(2)[0]])
    tier.close()
    os.utime(path, (1e9, 1e9))


@pytest.mark.parametrize(
    ("harm", "told"),
    [(flip, "section 1 does not have its checksum"), (cut, f"{SIZE - 1} bytes, not {SIZE}"), (renamed, "digest is"),
     (lost, "there is no file"), (stray, "a file that the index lacks")],
)  # fmt: skip
def test_verify(harm: Any, told: str, root: Path) -> None:
    assert run("verify", root=root).stdout == f"{root}: 5 blobs, all sound\n"
    harm(root, files(root)[blob(2)[0]])
    lines = run("verify", root=root, code=1).stdout.splitlines()
    assert lines[0].startswith(f"bad  {blob(2)[0].hex()}-") and told in lines[0]
    assert lines[1].endswith("1 bad; --repair removes them") and len(lines) == 2
    assert run("verify", "--repair", root=root).stdout.splitlines()[1].endswith("1 bad, removed")
    assert run("verify", root=root).stdout == f"{root}: 4 blobs, all sound\n"
    assert left(root) == {1, 3, 4}


@pytest.mark.parametrize("content", [None, b"no index" * 1000], ids=["none", "damaged"])
def test_an_index_is_made_anew(content: bytes | None, root: Path) -> None:
    path = root / "index.sqlite"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert "tiny-2" in run("ls", root=root).stdout, "the files are the truth"
    assert "index" in run("verify", root=root, code=1).stdout
    run("verify", "--repair", root=root)
    assert run("verify", root=root).stdout == f"{root}: 5 blobs, all sound\n" and left(root) == {1, 2, 3, 4}


def test_a_file_that_a_server_is_just_entering_is_no_flaw(root: Path) -> None:
    tier = DiskTier(root, 1 << 20)
    tier._index.remove([blob(2)[0]])
    tier.close()
    os.utime(files(root)[blob(2)[0]])
    run("verify", root=root)


def test_unreadable_headers(root: Path) -> None:
    files(root)[blob(4, OTHER)[0]].write_bytes(b"x" * SIZE)
    assert run("ls", root=root).stdout.splitlines()[-1].startswith("unreadable")
    run("rm", "unreadable", "--yes", root=root)
    assert left(root) == {1, 2, 3}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": 3}', "[" * 100_000], ids=["empty", "list", "lacks", "kinds", "deep"]
)
def test_notes_that_are_none(content: str, root: Path) -> None:
    (root / "notes" / f"{TINY.hex()}.json").write_text(content)
    (root / "notes" / "other").write_text(content)
    assert read_notes(root) == {}


def test_notes_where_none_can_be_kept(tmp_path: Path) -> None:
    write_note(tmp_path / "gone" / "kv", TINY, NOTE)
    (tmp_path / "notes").write_text("")
    write_note(tmp_path, TINY, NOTE)
    assert read_notes(tmp_path) == {}


def test_all_columns_are_readable_beside_a_long_name(root: Path) -> None:
    """In 80 columns, as a pipe has them too."""
    write_note(root, TINY, replace(NOTE, model="/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    console = Console(width=80, record=True, file=StringIO())
    show(console, listing(root, lambda done, total: None))
    said = " ".join(console.export_text().split())
    for word in (
        "bf16, KV int8",
        "SmolLM2-135M-",
        "Instruct.Q4_1",
        "no tenant",
        tenant_mark(b"acme").hex(),
        "now 00000000",
    ):
        assert word in said, said
    assert "\u2026" not in said


@pytest.mark.parametrize(("seconds", "told"), [(59, "now"), (60, "1 min ago"), (7300, "2 h ago"), (864000, "10 d ago")])
def test_how_long_ago(seconds: float, told: str) -> None:
    assert ago(seconds) == told


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("12h", 43200), ("7d", 604800), ("1.5 W", 907200)])
def test_ages(text: str, seconds: float) -> None:
    assert cache.age_s(text) == seconds


def test_blobs_of_other_names(root: Path) -> None:
    for name in (b"short", bytes(32) + b"z"):
        with pytest.raises(frame.DamagedBlob, match="its name is none"):
            frame.check_blob(blob(0)[1], name)
    name, data = blob(0)
    for wrong in (data[:40], data[:-1], data + b"x", b"x" + data[1:]):
        with pytest.raises(frame.DamagedBlob):
            frame.check_blob(wrong, name)
    assert frame.identity_of(data) == TINY and upkeep.HEAD >= 88
