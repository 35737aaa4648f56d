"""Makes the screens that docs/tour.md shows and writes them there: all of them, or those named."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.tour import PAGE, chosen, with_screens


def main() -> None:
    screens = {}
    for scene in chosen(sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            screens[scene.name] = scene.made(Path(folder))
        print(f"---- {scene.name}\n{screens[scene.name]}", flush=True)
    PAGE.write_text(with_screens(PAGE.read_text(encoding="utf-8"), screens), encoding="utf-8")


if __name__ == "__main__":
    main()
