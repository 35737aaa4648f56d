"""docs/tour.md shows what the commands show today, but for figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tour import PAGE, SCENES, Scene, on_page

pytestmark = [pytest.mark.processes, pytest.mark.matrix]


def test_page_has_every_screen() -> None:
    assert sorted(on_page(PAGE.read_text(encoding="utf-8"))) == sorted(scene.name for scene in SCENES)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_screen_is_as_the_page_says(scene: Scene, tmp_path: Path) -> None:
    shown = on_page(PAGE.read_text(encoding="utf-8"))[scene.name]
    assert scene.same(scene.made(tmp_path)) == scene.same(shown), "python -m tools.tour.write writes it anew"


def test_times_are_no_matter() -> None:
    """Nor whether they keep a limit, which a machine that is busy may miss. Words are."""
    shown = on_page(PAGE.read_text(encoding="utf-8"))["bench"]
    scene = next(each for each in SCENES if each.name == "bench")
    assert re.search(r" ok$", shown, re.MULTILINE)
    assert scene.same(shown) == scene.same(re.sub(r"\d\.\d\d", "25.10", shown).replace(" ok", " short"))
    assert scene.same(shown) != scene.same(shown.replace("bookkeeping ", "keeping "))
