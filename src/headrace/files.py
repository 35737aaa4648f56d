"""Opening files that something else may have been put in place of: a pipe, a device, a link, a file of any size.

`own`: files that Headrace writes itself (memos, indices, tables, secrets); a link in their place is refused.
`given`: files that a person names or a model folder holds, which may be links (Hugging Face's cache is made of them).
Neither waits: opening a pipe that nobody writes to would hold up the start for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path


def open_own(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor. Raises OSError, which names the path, also for anything but a regular file."""
    return _opened(path, flags | os.O_NOFOLLOW, mode)


def read_own(path: Path, most: int) -> bytes:
    """The whole content. Raises OSError as open_own does, and for more than `most` bytes."""
    return _read(open_own(path), path, most)


def open_given(path: Path) -> FileIO:
    """Unbuffered. Raises OSError, which names the path, also for anything but a regular file behind all links."""
    return FileIO(_opened(path, os.O_RDONLY, 0))


def check_can_write(name: str, path: Path) -> None:
    """Raises ValueError, naming the option, for a file that could not be written once there is something to write."""
    if path.is_dir():
        raise ValueError(f"{name} {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{name} {path}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{name} {path} may not be written by this user; name another file")


def read_given(path: Path, most: int) -> bytes:
    """The whole content. Raises OSError as open_given does, and for more than `most` bytes."""
    return _read(_opened(path, os.O_RDONLY, 0), path, most)


def _opened(path: Path, flags: int, mode: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed here", str(path)) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _read(descriptor: int, path: Path, most: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))
    return data
