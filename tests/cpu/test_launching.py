"""Direct launches of Triton's kernels over a stub of the CUDA driver: what it is handed, and when Triton launches."""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu launches there", allow_module_level=True)

import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction

from headrace import SamplingParams
from headrace.bench.shapes import CheckpointShape
from headrace.config import RecurrentSpec, RoutingSpec
from headrace.engine.programs import Eager, Logits, StepRows
from headrace.kernels.quantized import Rounded
from headrace.kernels.records import Mask, Pool
from headrace.kernels.state import StateRows
from headrace.kernels.triton import (
    adapted,
    adapted_kernels,
    attention,
    attention_kernels,
    change_kernels,
    changing,
    delta_kernels,
    draw_kernels,
    experts,
    int8_kv_kernels,
    kept_row_kernels,
    kept_rows,
    latent_kernels,
    latent_row_kernels,
    launch_agreement,
    launch_entries,
    launch_kernels,
    launching,
    mamba2_kernels,
    piece_kernels,
    pieces,
    pinned,
    pinned_kernels,
    product_kernels,
    rotary_kernels,
    rounded,
    rounded_kernels,
    row_kernels,
    sample_kernels,
    short_conv_kernels,
    tiles,
    token_kernels,
    weight_kernels,
    weights,
)
from headrace.kernels.triton.changing import Changes
from headrace.kernels.triton.launch_entries import CONTRACTED, Blocks, TensorMaps, Unexpected, block_form
from headrace.kernels.triton.launching import DirectKernel, direct
from headrace.kernels.triton.recurrent import step_alone
from headrace.kernels.triton.sampling import Chooser, Needs
from tests.support.launched_latents import launched_latents
from tests.support.launched_steps import as_on_hopper, engine
from tests.support.recurrent_cases import SLOTS, RecurrentCase
from tests.support.stub_driver import Launched, stub_driver, uninterpreted, without_code

pytestmark = pytest.mark.filterwarnings("error:TRITON_DEFAULT_FP_FUSION")

CPU, BF16 = torch.device("cpu"), torch.bfloat16
MODULES = (
    adapted_kernels, attention_kernels, change_kernels, delta_kernels, draw_kernels, int8_kv_kernels,
    kept_row_kernels, latent_kernels, latent_row_kernels, launch_kernels, mamba2_kernels, piece_kernels,
    pinned_kernels, product_kernels, rotary_kernels, rounded_kernels, row_kernels, sample_kernels,
    short_conv_kernels, token_kernels, weight_kernels,
)  # fmt: skip
SHAPE = CheckpointShape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=64, mlp=128, vocab=64, context=1024)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """What the driver is asked for."""
    uninterpreted(monkeypatch, *MODULES)
    monkeypatch.setattr(launching, "_known", {})
    launching._say.cache_clear()
    with stub_driver(without_code) as found:
        yield found


@pytest.fixture
def compared(seen: list[Launched], monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Each launch is made three times: it may be the first of its kinds, then by Triton, then directly, and the latter
    two must ask the driver for the same. How many there were, by kernel."""
    launch, by_triton, counts = DirectKernel.launch, DirectKernel._by_triton, dict[str, int]()

    def thrice(
        self: DirectKernel, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        launch(self, grid, arguments, constants)
        seen.clear()
        by_triton(self, grid, arguments, constants)
        with monkeypatch.context() as patch:
            patch.setattr(DirectKernel, "_by_triton", None)
            launch(self, grid, arguments, constants)
        assert len(seen) == 2 and seen[0] == seen[1], self.kernel.__name__
        counts[self.kernel.__name__] = counts.get(self.kernel.__name__, 0) + 1

    monkeypatch.setattr(DirectKernel, "launch", thrice)
    return counts


def steps(shape: CheckpointShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of many rows and one of few, then both decoding, drawn from logits that are zeros."""
    run = Eager.run

    def zeros(self: Eager, step: StepRows) -> Logits:
        return Logits(torch.zeros_like(run(self, step).values))

    with monkeypatch.context() as patch, engine(shape, patch, kv_cache_tokens=1024, max_sequences=2) as llm:
        patch.setattr(Eager, "run", zeros)
        runner: Any = llm.engine.loaded.executor
        runner.decoding.step.known(2)
        runner.decoding = runner.eager  # what is looked up is no token: nothing is computed
        params = SamplingParams(temperature=0.8, top_k=3, top_p=0.9, max_tokens=2, ignore_eos=True)
        llm.generate([[1] * 300, [2, 3]], params)


def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each kind of tile."""
    x, w, out = (torch.zeros(size, 128, dtype=BF16) for size in (300, 256, 300))
    monkeypatch.setattr(tiles, "overlaps", lambda device: True)
    tiles.product(tiles.Tile(128, 128, 64, 4, 4, "many"), x, w[:128], None, out)
    tiles.product(tiles.Tile(128, 128, 64, 8, 3), x, w[:128], out[0], out)


def codes() -> None:
    """A weight in codes, of few rows and of many, and a mixture of experts."""
    coded = weights.GpuQuantized(Rounded(torch.randn(64, 2048), "int8"), CPU)
    for rows in (3, 300):
        weights.linear(torch.zeros(rows, 2048, dtype=BF16), coded)
    for kind in ("w8a8", "fp8_rowwise"):
        whole = rounded.GpuRounded(Rounded(torch.randn(64, 64), kind), CPU)
        rounded.product(torch.zeros(3, 64, dtype=BF16), whole, None, torch.zeros(3, 64, dtype=BF16))
    many = [torch.zeros(64, 64, dtype=BF16) for _ in range(4)]
    ups = experts.GpuExperts(many, None)
    for routing, correction in ((RoutingSpec(), None), (RoutingSpec("sigmoid", True, 2, 1, 2), torch.zeros(4))):
        routes = partial(experts.route, chosen=2, normalised=True, routing=routing, correction=correction)
        experts.GpuMixture(ups, ups, lambda x: x, routes)(torch.zeros(5, 64, dtype=BF16), torch.zeros(5, 4))


def changes() -> None:
    """Of rows with two adapters, one of which has nothing for the matrix."""
    down, up = torch.zeros(32, 64, dtype=BF16), torch.zeros(64, 32, dtype=BF16)
    x = torch.zeros(5, 64, dtype=BF16)
    rows = adapted.arranged(torch.tensor([0, -1, 1, 0, 0]), 2)
    adapted.GpuPairs([(down, up), None]).added(rows, x, x.clone())


def stores() -> None:
    """int8 keys and values, a restore, and activations."""
    parts = Pool.parts(4, 2, 64, torch.int8)
    pool = Pool(*(torch.zeros(*shape, dtype=dtype) for shape, dtype in parts))
    rows, places = torch.zeros(3, 2, 64, dtype=BF16), torch.zeros(3, dtype=torch.int32)
    attention.append(pool, rows, rows, places, places)
    kept_rows.keep_rows(torch.zeros(2, 64, 64, dtype=BF16), torch.zeros(3, 64, dtype=BF16), places, places)
    pinned.gather(torch.zeros(2, 64, dtype=torch.uint8), list(torch.zeros(2, 64, dtype=torch.uint8)))


def states() -> None:
    """A span begun by one call and ended by another, merged with what another rank has of it."""
    parts = Pool.parts(4, 2, 64, BF16)
    pool = Pool(*(torch.zeros(*shape, dtype=dtype) for shape, dtype in parts))
    q, positions = torch.zeros(2, 4, 64, dtype=BF16), torch.tensor([127, 127])
    items = (torch.tensor([[slot, 64 * slot, 0, 2]], dtype=torch.int32) for slot in (0, 1))
    first, second = (Mask(each, positions, scale=0.125) for each in items)
    state = pieces.partial(q, pool, second, pieces.partial(q, pool, first))
    pieces.merge_into(state.total, [StateRows(0, 2, state.block)], state.unit)
    pieces.finish(state, BF16)


def recurrence() -> None:
    """A layer of each kind."""
    shared = RecurrentSpec(1, 2, 4, 32, 32, 4)
    for spec in (shared, replace(shared, kind="mamba2"), RecurrentSpec.short_convolutions(1, 40, 3)):
        case = RecurrentCase(spec, 3, BF16)
        step = step_alone(spec, torch.tensor([[0, 3, -1, 0]]), 3, SLOTS, CPU)
        step(case.mixed.contiguous(), case.gates, case.weights, case.copied())


def choices() -> None:
    chooser = Chooser(2, 5000, CPU)
    logits, needs = torch.zeros(2, 5000), Needs(reports=True, leaders=3, draws=True, top_k=True, watched=True)
    chooser.choose(logits, 2, needs)
    chooser.choose(logits, 2, replace(needs, listed=4, changed=True))
    request = torch.tensor([Changes(5000, True, 3, CPU).request(1, 1.5, 0.5, 0.5)])
    changing.change(logits, request)
    changing.count(request, chooser.tokens)


def test_a_direct_launch_asks_the_driver_for_what_triton_does(
    compared: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Function, grid, block, shared memory, stream, attributes, and each argument to the byte: of every place where
    kernels are launched."""
    steps(SHAPE, monkeypatch)
    assert {"flash", "split", "product_of_few", "rotate_heads"} <= compared.keys()
    assert "walk" not in compared
    steps(CheckpointShape(64, 1, 2, 1, 512, 64, vocab=64, context=1024), monkeypatch)
    products(monkeypatch)
    codes()
    changes()
    stores()
    states()
    recurrence()
    as_on_hopper(monkeypatch)
    launched_latents()
    choices()
    folder = Path(launching.__file__).parent
    texts = [file.read_text() for file in folder.glob("*.py")]
    places = {name for text in texts for name in re.findall(r"direct\([\w.()]+\.(\w+)\)\[", text)}
    assert len(places) > 25 and places == compared.keys()


ARGUMENTS: list[Any] = [
    0, 1, 2, 15, 16, 17, 48, -1, -15, -16, (1 << 31) - 16, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 40, (1 << 64) - 1,
    0.0, 1.0, 2.5, True, False,
    *(torch.zeros(64, dtype=dtype)[first:] for dtype in (BF16, torch.float32, torch.int8) for first in (0, 1, 16)),
    *(Blocks(torch.zeros(64, 64, dtype=BF16), block_form(*form)) for form in ((8, 64), (16, 64), (16, 32))),
    Blocks(torch.zeros(64, 64, dtype=torch.float16), block_form(8, 64)),
]  # fmt: skip


def test_what_triton_compiles_anew_for_is_of_another_kind(seen: list[Launched]) -> None:
    kernel = direct(row_kernels.norm)

    def compiled(argument: Any, specialised: bool) -> Any:
        taken = argument.form.described(argument.tensor) if isinstance(argument, Blocks) else argument
        return native_specialize_impl(BaseBackend, taken, False, specialised, True)

    kinds = [kernel._kinds((each,)) for each in ARGUMENTS]
    alike = 0
    for one, kind in zip(ARGUMENTS, kinds, strict=True):
        for other, kind2 in zip(ARGUMENTS, kinds, strict=True):
            if kind is not None and kind2 is not None and kind[0] == kind2[0]:
                alike += 1
                assert [compiled(one, wanted) for wanted in (True, False)] == [
                    compiled(other, wanted) for wanted in (True, False)
                ]
    assert alike > len(ARGUMENTS)


def norm(x: torch.Tensor, width: int = 64, **options: Any) -> None:
    direct(row_kernels.norm)[(4, 1)](
        x, x, x, x, x, x, width, 1e-5, 0.0, 64, 1, P=64, ADD=False, RMS=True, WEIGHT=True, BIAS=False, OVERLAPS=False,
        **options,
    )  # fmt: skip


def by_triton(monkeypatch: pytest.MonkeyPatch, **given: Any) -> int:
    """How many of three launches Triton makes."""
    made, ordinary = list[int](), DirectKernel._by_triton
    with monkeypatch.context() as patch:
        patch.setattr(DirectKernel, "_by_triton", lambda self, *all: made.append(1) or ordinary(self, *all))
        for _ in range(3):
            norm(torch.zeros(4, 64), **given)
    return len(made)


def test_triton_launches_what_is_not_as_expected(
    seen: list[Launched], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first launch of its kinds, wide numbers, and all that a profiler or a hook of the kernel is told of. The log
    tells once."""
    caplog.set_level(logging.DEBUG, logger="headrace")
    assert by_triton(monkeypatch) == 1 and by_triton(monkeypatch) == 0
    assert by_triton(monkeypatch, num_warps=8) == 1
    assert not caplog.records
    assert by_triton(monkeypatch, width=1 << 31) == 3
    assert [record.message for record in caplog.records] == [
        "norm is launched by Triton: an argument of type int, or of more than 32 bits"
    ]

    def hook(*told: object, **constants: object) -> None:
        hooked.append(told)

    hooked = list[object]()
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert by_triton(monkeypatch) == 3 and len(hooked) == 3
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    row_kernels.norm.pre_run_hooks.append(hook)
    assert by_triton(monkeypatch, num_warps=16) == 3


def test_a_named_argument_is_refused(seen: list[Launched]) -> None:
    """It would be taken for a constant. Also in the interpreter."""
    interpreted = InterpretedFunction(row_kernels.norm.fn)
    for kernel in (row_kernels.norm, interpreted):
        for _ in range(2):
            with pytest.raises(ValueError, match="norm is not compiled for width, x: give it by its place"):
                direct(kernel)[(1,)](x=torch.zeros(64), width=64, P=64)
    assert not seen


def test_compiled_kernels_that_are_not_launched_directly(seen: list[Launched]) -> None:
    """One that needs scratch memory, one whose blocks are loaded, and one that is not what Triton's version has."""
    x = torch.zeros(8, 64, dtype=BF16)
    given = [block_form(8, 64).described(x), x, 1.0, 1, 2, 3, x]
    constants = {"ROWS": 8, "COLUMNS": 64, "COPIED": True, **CONTRACTED}
    kernel = launch_kernels.echo[(1,)](*given, **constants)

    def refused(match: str, **others: Any) -> None:
        with pytest.raises(Unexpected, match=match):
            launch_entries.entry_of(launch_kernels.echo, kernel, len(given), others or constants)

    kernel.run.global_scratch_size = 1
    refused("memory of its own")
    kernel.run.global_scratch_size = 0
    refused("not as expected: KeyError", ROWS=8)
    kernel.metadata = kernel.metadata._replace(tensordesc_meta=[])
    refused("not copied by the GPU")
    del kernel.run.launch_pdl
    kernel.metadata = kernel.metadata._replace(tensordesc_meta=[{}])
    refused("not as expected: AttributeError")


def test_another_version_of_triton(seen: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not known, and one whose insides are others than known ones."""
    monkeypatch.setattr(launch_entries, "_ENTRIES", {})
    assert by_triton(monkeypatch, num_warps=2) == 3
    monkeypatch.setattr(launching, "SUPPORTED", False)
    monkeypatch.setattr(launching, "_known", {})
    monkeypatch.setattr(launching, "_watched", None)
    assert by_triton(monkeypatch) == 3


def test_a_tensor_map_is_made_once_and_keeps_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[int, list[int], list[int]]]()

    def encoded(given: Any) -> list[Any]:
        made.append((given.base.data_ptr(), list(given.shape), list(given.strides)))
        return [len(made)]

    maps, form = TensorMaps(encoded), block_form(8, 64)
    whole = torch.zeros(64, 128, dtype=BF16)
    given = [whole, whole[:32], whole[32:], whole[:, :64], whole[::2], whole.view(128, 64)]
    for _ in range(2):
        assert [maps(Blocks(each, form))[0] for each in given] == [1, 2, 3, 4, 5, 6]
    assert made == [(each.data_ptr(), list(each.shape), list(each.stride())) for each in given]
    gone = weakref.ref(whole)
    del whole, given
    assert gone() is None
    monkeypatch.setattr(launch_entries, "MAPS", 8)
    for _ in range(20):
        maps(Blocks(torch.zeros(64, 64, dtype=BF16)[len(made) % 60 :], form))
        assert len(maps._made) <= 8


def test_the_device_is_asked_first(
    seen: list[Launched], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that tells how its arguments arrive is launched by Triton and directly: once for each device, not while
    a graph is recorded. What differs, or cannot be done, leaves all launches to Triton, and the log says so."""
    monkeypatch.setattr(launch_agreement, "_copies_blocks", lambda device: True)
    assert launch_agreement._compared(CPU)
    # of plain and of described blocks: Triton's first launch, then a direct one and Triton's, twice
    assert len(seen) == 10
    monkeypatch.setattr(torch, "equal", lambda *given: False)
    assert not launch_agreement._compared(CPU)
    monkeypatch.setattr(launch_agreement, "entry_of", lambda *given: (_ for _ in ()).throw(Unexpected("other insides")))
    assert not launch_agreement._compared(CPU)
    assert [record.message for record in caplog.records] == [
        "kernels get other arguments when launched directly, and are launched by Triton",
        "kernels cannot be launched directly, and are launched by Triton: other insides",
    ]
    monkeypatch.setattr(launch_agreement, "_found", {})
    monkeypatch.setattr(launch_agreement, "_compared", lambda device: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launch_agreement.agrees(0) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert launch_agreement.agrees(0) is False
    for answer in (None, False):
        monkeypatch.setattr(launch_agreement, "agrees", lambda device, answer=answer: answer)
        assert by_triton(monkeypatch, num_warps=2) == 3
