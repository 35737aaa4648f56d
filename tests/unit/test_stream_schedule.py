"""The order of a streamed step, as data: KVPR's Algorithm 1 with its wrap rules, and what Headrace changes of it."""

from __future__ import annotations

from itertools import product

import pytest

from headrace.offload.streaming.schedule import Prefetch, StepShape, first_loads, stages

pytestmark = pytest.mark.unit

SIZES = list(product((1, 2, 3, 8), (1, 2, 3, 4)))


def algorithm_1(layers: int, batches: int, step: int, last_step: int) -> list[list[tuple[str, int, int, int]]]:
    """The paper's loop for one generated token: per (layer, batch) its loads as (what, i, j, k), written down as there.

    Wrap rules: k = batches -> k = 0, j + 1; j = layers -> j = 0, i + 1; past the end of the answer nothing.
    """

    def wrap(i: int, j: int, k: int) -> tuple[int, int, int] | None:
        if k == batches:
            j, k = j + 1, 0
        if j == layers:
            i, j = i + 1, 0
        return None if i > last_step else (i, j, k)

    found = []
    for j, k in product(range(layers), range(batches)):
        loads = [("load_weight", wrap(step, j + 1, k)), ("load_activation_recompute", wrap(step, j, k + 1)),
                 ("load_cache", wrap(step, j, k + 1)), ("load_activation", wrap(step, j, k + 1))]  # fmt: skip
        found.append([(name, *where) for name, where in loads if where is not None])
    return found


@pytest.mark.parametrize(("layers", "batches"), SIZES)
def test_column_is_algorithm_1(layers: int, batches: int) -> None:
    """The same loads at the same operations, within a step. What of the paper's crosses into the next step is what
    Headrace leaves out, as that step is not scheduled yet: only weights do. Hidden states of one batch never leave;
    those of the first layer are made there; a model of one layer keeps its weights."""
    names = {
        "weights": "load_weight",
        "x": "load_activation_recompute",
        "kv": "load_cache",
        "hidden": "load_activation",
    }
    form = StepShape(layers, batches, "column", weights=True, fine=False)
    ours = stages(form)
    theirs = algorithm_1(layers, batches, step=5, last_step=6)
    assert len(ours) == len(theirs) == layers * batches
    for stage, loads in zip(ours, theirs, strict=True):
        wanted = {
            (name, i, j, k) for name, i, j, k in loads
            if (i == 5 or name == "load_weight")
            and not (name == "load_activation" and (batches == 1 or j == 0))
            and not (name == "load_weight" and layers == 1)
        }  # fmt: skip
        assert {(names[x.kind], 5 + x.wraps, x.layer, x.batch) for x in stage.prefetch} == wanted
        kinds = [load.kind for load in stage.prefetch]
        assert kinds == sorted(kinds, key=["weights", "hidden", "x", "kv"].index), "X goes before K and V"
    for stage, (j, k) in zip(ours, product(range(layers), range(batches)), strict=True):
        assert (stage.layer, stage.batch) == (j, k)
        assert stage.stores_hidden == (batches > 1 and j + 1 < layers)


@pytest.mark.parametrize("schedule", ["row", "column"])
@pytest.mark.parametrize(("layers", "batches"), SIZES)
def test_everything_is_loaded_once_and_before_it_is_needed(layers: int, batches: int, schedule: str) -> None:
    """With pieces of every number; and never into a buffer that is in use: there are two."""
    form = StepShape(layers, batches, schedule, weights=True)  # type: ignore[arg-type]

    def pieces(layer: int, batch: int) -> int:
        return 1 + (layer + batch) % 3

    found = stages(form, pieces)
    index = {(s.layer, s.batch, s.piece): at for at, s in enumerate(found)}
    assert len(index) == len(found) == sum(pieces(j, k) for j, k in form.order())
    issued: dict[Prefetch, int] = dict.fromkeys(first_loads(form), -1)
    for at, stage in enumerate(found):
        for load in stage.prefetch:
            assert load not in issued or load.kind in ("weights", "rest"), f"{load} is loaded twice"
            issued[load] = at
    for key, at in index.items():
        kv, x = issued.pop(Prefetch("kv", *key)), issued.pop(Prefetch("x", *key))
        assert kv == x == at - 1
    if schedule == "column" and batches > 1:
        for layer, batch in product(range(1, layers), range(batches)):
            assert issued.pop(Prefetch("hidden", layer, batch)) < index[layer, batch, 0]
    assert {load.kind for load in issued} <= {"weights", "rest"}


@pytest.mark.parametrize(("layers", "batches"), SIZES)
@pytest.mark.parametrize("schedule", ["row", "column"])
def test_weights_of_the_next_layer_come_while_one_computes(layers: int, batches: int, schedule: str) -> None:
    form = StepShape(layers, batches, schedule, weights=True)  # type: ignore[arg-type]
    weights = [(s, x) for s in stages(form) for x in s.prefetch if x.kind in ("weights", "rest")]
    if layers == 1:
        assert not weights
        return
    for stage, load in weights:
        assert load.layer == (stage.layer + 1) % layers
        assert load.batch == (stage.batch if schedule == "column" else 0)
    passes = 1 if schedule == "column" else batches
    assert len(weights) == 2 * layers * passes * form.slices
    assert sum(load.wraps for _, load in weights) == 2 * form.slices, "layer 0 of the next step, once"
    for stage in stages(form):
        kinds = [load.kind for load in stage.prefetch]
        assert kinds[0] == "weights" and kinds[-1] == "rest", "what makes K and V first, the rest last"


def test_row_goes_batch_by_batch() -> None:
    assert StepShape(2, 2, "row").order() == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert StepShape(2, 2, "column").order() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not any(load.kind == "hidden" for stage in stages(StepShape(4, 3, "row")) for load in stage.prefetch)


@pytest.mark.parametrize("bad", [{"layers": 0}, {"batches": 0}])
def test_refuses(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no schedule"):
        StepShape(**{"layers": 2, "batches": 1, "schedule": "row", **bad})  # type: ignore[arg-type]
