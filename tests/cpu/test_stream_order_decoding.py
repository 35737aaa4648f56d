"""What streamed decoding does on streams of a device: the bits of the host, every access ordered, each wait needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from headrace import LLM, SamplingParams, arrival, device
from headrace.kernels import dispatch, reference
from headrace.kernels.records import Pool, StepInputs
from headrace.offload import copy_streams, ticket
from headrace.offload.copy_streams import open_copy_streams
from headrace.offload.streaming.transfers import Transfers
from headrace.offload.weights.streamed import StreamedLayers
from tests.support.ordered_threads import ordered_threads
from tests.support.stream_order import StreamOrder
from tests.support.traces import run, same, words

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "attention_backend": "reference", "max_model_len": 512}
FORMS: dict[str, dict[str, Any]] = {
    "row": {"offload_schedule": "row"},
    "row, X in memory": {"offload_schedule": "row", "offload_x_resident": True},
    "column": {"offload_schedule": "column", "offload_batches": 2},
    "weights outside": {"offload_schedule": "column", "offload_batches": 2, "weight_offload": True},
}


EVERY = {("_carry", "wait_event"), ("wait in _wait", "wait_event"), ("wait in claim", "wait_event")}
"""Functions that wait, and how."""
HIDDEN, WEIGHTS = ("wait in run", "wait_event"), ("wait in wait", "wait_event")
"""Hidden states that wait outside come back after they have left. What a layer multiplies by has come."""
NEEDED = {"column": EVERY | {HIDDEN}, "weights outside": EVERY | {HIDDEN, WEIGHTS}}
TIMES = {("seconds", "synchronize"), ("run", "synchronize"), ("finish", "synchronize")}
"""Waits that order nothing that is not ordered without: for times and errors."""


class Prepared:
    """Append and attention in one call, by torch."""

    def __init__(self, step: StepInputs) -> None:
        self.step, self.masks = step, step.masks(step.positions)

    def __call__(self, pool: Pool, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Any = None) -> Tensor:
        reference.append(pool, k, v, self.step.slots, self.step.offsets)
        return reference.attend(q, pool, self.masks[window])


@contextmanager
def streaming(order: StreamOrder, monkeypatch: pytest.MonkeyPatch, **form: Any) -> Iterator[LLM]:
    """An engine whose staging is the device's, and whose kernels are torch's operations on it."""
    ordered_threads(order, monkeypatch, (arrival, ticket, copy_streams))
    if "weight_offload" in form:
        monkeypatch.setattr(dispatch, "_forced", "torch")  # whose products tell what they read
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: False)
    llm = LLM("tiny", kv_offloading_size=0.01, kv_offload_activations="on", **form, **SETTINGS)
    streamer = llm.engine.loaded.executor.streamer  # type: ignore[attr-defined]
    streamer.options.share = 0.5
    transfers = streamer.transfers
    transfers.streams.close()
    with device.use(order):
        transfers.device, transfers.streams = order, open_copy_streams(order)
        if isinstance(transfers.layers, StreamedLayers):
            watch_weights(order, transfers.layers)
            transfers.layers.stream = transfers.streams.into
        transfers.kernels = SimpleNamespace(append=reference.append, prepare=Prepared)
        for buffer, pool in enumerate(transfers.staging.kv):
            for x in (*pool.tensors, transfers.staging.x[buffer]):
                order.watch(x, f"staging {buffer}")
        for layer, (pool, kept) in enumerate(zip(transfers.store.pools, transfers.store.x, strict=True)):
            for x in pool.tensors:
                order.watch(x, f"the store's layer {layer}", held=False)
            order.watch(kept, f"the store's X of layer {layer}", held=transfers.x_resident)
        with order.recording():
            yield llm
        transfers.streams.close()


def watch_weights(order: StreamOrder, layers: StreamedLayers) -> None:
    for number, buffer in enumerate(layers.buffers):
        for name, room in buffer.room.items():
            order.watch(room, f"{name} in buffer {number}")
    for layer in layers.outside:
        for weight in layer.matrices.values():
            assert isinstance(weight, Tensor)
            order.watch(weight, f"weights outside of layer {layer.index}", held=False)


def answers(llm: LLM) -> Any:
    """Two sequences that share a chunk and one of its own; then the first again, on what is stored."""
    first = words(llm, 150, seed=1)
    prompts = [first, first[:70] + words(llm, 30, seed=2), words(llm, 80, seed=3)]
    return run(llm, prompts, PARAMS) + run(llm, prompts[:1], PARAMS)


@cache
def truth(form: str) -> Any:
    with dispatch.force("torch" if "weight_offload" in FORMS[form] else None):
        return answers(LLM("tiny", kv_cache_tokens=2048, **SETTINGS))


@pytest.mark.parametrize("form", FORMS)
def test_all_is_ordered(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order, expected = StreamOrder(), truth(form)
    with streaming(order, monkeypatch, **FORMS[form]) as llm:
        same(answers(llm), expected)
        transfers = llm.engine.loaded.executor.streamer.transfers  # type: ignore[attr-defined]
        assert min(transfers.throughput.link._latest) > 0, "a transfer counted before its end"
    assert not order.violations
    assert order.seen == NEEDED.get(form, EVERY) | TIMES


def test_hidden_states_of_a_batch_leave_to_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers: memory is pinned once for each batch of a step."""
    order, pinned, sent = StreamOrder(), list[int](), list[Tensor]()
    pin, send = order.pinned, Transfers.send_hidden

    def sending(self: Transfers, x: Tensor, *before: Any) -> Any:
        sent.append(x)
        return send(self, x, *before)

    with streaming(order, monkeypatch, **FORMS["column"]) as llm:
        monkeypatch.setattr(order, "pinned", lambda *asked: (pinned.append(1), pin(*asked))[1])
        monkeypatch.setattr(Transfers, "send_hidden", sending)
        answers(llm)
    layers = llm.engine.loaded.decoder.config.attention.layers
    assert layers > 2 and len(sent) == (layers - 1) * len(pinned) > 0


@pytest.mark.parametrize(
    ("form", "place"),
    [
        *(("row", place) for place in sorted(EVERY)),
        ("column", HIDDEN),
        pytest.param("weights outside", WEIGHTS, marks=pytest.mark.matrix),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given).replace(" ", "-"),
)
def test_a_dropped_wait_is_found(form: str, place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    order = StreamOrder(dropped=place)
    with streaming(order, monkeypatch, **FORMS[form]) as llm:
        answers(llm)
    assert order.violations


@pytest.mark.matrix
def test_a_buffer_of_weights_is_not_filled_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies begin behind what was computed when they were submitted: else the layer before last loses its weights."""
    order = StreamOrder(dropped=("_carry", "wait_event"))
    with streaming(order, monkeypatch, **FORMS["weights outside"]) as llm:
        answers(llm)
    assert any("weight in buffer" in told for told in order.violations)
