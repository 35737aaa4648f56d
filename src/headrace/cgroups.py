"""The control groups that this process is in, by which a container's limits are set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(controller: str) -> Iterator[tuple[Path, int]]:
    """(Folder, version 1 or 2) of each group that limits this process by `controller` ('cpu', 'memory'): its own and
    those that it is part of. In a container its own may be the root."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root, version = (CGROUPS / controller, 1) if controllers else (CGROUPS, 2)
            inside = PurePosixPath(path.lstrip("/"))
            yield from ((root / part, version) for part in (inside, *inside.parents) if ".." not in part.parts)
