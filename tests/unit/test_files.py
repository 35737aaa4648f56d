"""What stands in a file's place: pipes and devices do not hold us up, links in place of our own files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.files import open_given, open_own, read_given, read_own

pytestmark = pytest.mark.unit


def test_reads(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert read_own(path, 3) == read_given(path, 3) == b"abc"
    with open_given(path) as file:
        assert file.read() == b"abc"
    for read in (read_own, read_given):
        with pytest.raises(OSError, match="larger than 2 bytes"):
            read(path, 2)
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "y", 2)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (read_own, read_given):
            with pytest.raises(OSError, match="is not a regular file"):
                read(path, 10)


def test_links_are_followed_only_where_a_person_named_them(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert read_given(tmp_path / "link", 3) == b"abc"
    with pytest.raises(OSError, match="symbolic link"):
        read_own(tmp_path / "link", 3)


def test_own_files_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    os.close(open_own(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_descriptors_are_not_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError):
            read_given(tmp_path, 10)
    assert len(os.listdir("/proc/self/fd")) == before
