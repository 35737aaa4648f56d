"""One decoder for all families, built from the facts in ModelConfig.

T: rows (tokens) of a step, of all sequences together. H: hidden size, E: embedding and head width, V: vocabulary,
Hq, Hkv: query and KV heads, D: head size.
No row's bits depend on other rows here (docs/architecture.md, rule 2): sums run inside headrace.kernels.ops or within
one row, and whatever is elementwise is add, multiply or a table look-up.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.kernels import block, dispatch, ops
from headrace.kernels.adapted_rows import AdaptedRows, placed
from headrace.kernels.backend import Attend
from headrace.kernels.model_step import Ends, InputsEnds, ModelStep
from headrace.kernels.recurrent import Recur
from headrace.memory import give_back
from headrace.models.adapter_files import AdapterFacts
from headrace.models.adapters import Adapters, load_adapters
from headrace.models.alibi import alibi_bias
from headrace.models.config import ModelConfig, read_config
from headrace.models.hybrid import check_shared
from headrace.models.hyper import entered, left
from headrace.models.latent import of_each_head
from headrace.models.layer_kinds import layer_kind, one_by_one, tell_why_not_whole
from headrace.models.layers import Layer, OneByOne, Weights, norm
from headrace.models.made_weights import made_weights
from headrace.models.mixed_layers import MixedLayers, input_scales, layer_inputs
from headrace.models.packing import ExpertsPlace, Leave, StoredPacking, multiplied, pack_all, with_both
from headrace.models.rope import Rope
from headrace.models.shards import ALONE, Gathered, ShardGroup, Share, Unsent
from headrace.models.sizes import EMBED, HEAD, HEAD_BIAS, refuse_rounding
from headrace.models.spec import CLASSIFIER
from headrace.models.tables import is_tied, take_tables
from headrace.models.weights import OnProgress, StoredMatrix, load_weights
from headrace.models.whole_layers import never_whole, shape_of
from headrace.models.x_turns import XTurns
from headrace.types import CHUNK

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}
"""Compute type by checkpoint type."""


@dataclass(slots=True)
class TokenBatch:
    """Rows of one step: token_ids [T] and absolute positions [T], int64.

    `rope_lengths` [T] = max(prompt length, position + 1), for models with rope_depends_on_length. `adapters`, int64
    [T]: numbers of the rows' adapters, -1 for none; None where no row has one.
    """

    token_ids: Tensor
    positions: Tensor
    rope_lengths: Tensor | None = None
    adapters: Tensor | None = None


class Decoder:
    """A loaded model. It keeps no state between calls; keys and values live with whoever supplies `attend`.

    It computes on the device of its weights; a TokenBatch stays on the CPU.

    `matrices` are the weights that rows are multiplied by, packed where that pays; `tables` those that are looked up;
    `weights` the tensors that are not packed; `stored` what the checkpoint has as codes. `dtype`: of what is computed,
    where `weights` have no table of tokens.

    `key_bias` [Hq, max_model_len] fp32 is added to the scaled scores by head and key position (ALiBi), if not None.
    `sinks`, fp32 [Hq] for each layer, if not None: scores of a key without a value (kernels.records.Mask).

    With `tensor`, one of several tensor ranks: `weights` are its share, and `config.attention` and `key_bias` become
    those of its own heads, so that keys and values are stored for these alone. All ranks of the group call `forward`
    with the same batches in the same order, and get the same hidden states; rank 0 alone has `logits`. `share`: what it
    computes; None where that is everything. `turns`: whose turn it is to keep a chunk's activations. `outside`: takes
    the experts as they are packed; they stay there. `leave`: takes each matrix as it is packed, and gives it back from
    where it stays. `adapters`: those that rows may have, see `adapt`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        quantization: Quantization = "none",
        tensor: ShardGroup | None = None,
        packed: OnProgress | None = None,
        stored: Mapping[str, StoredMatrix] | None = None,
        outside: ExpertsPlace | None = None,
        leave: Leave | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        weights = made_weights(config, weights)
        table = weights[EMBED] if EMBED in weights else torch.empty(0, dtype=dtype)
        self.share = share = _share(config, tensor, dispatch.on_gpu(table))
        self.turns = XTurns(None if share is None else tensor)
        self.config = config if share is None else share.own
        self.dtype, self.device, tied = table.dtype, table.device, is_tied(weights)
        outputs = {} if share is None else share.outputs
        if config.latent is not None and not dispatch.on_gpu(table):
            weights = of_each_head(config.latent, weights)
        both = with_both(weights, stored or {})
        self.matrices = pack_all(weights, quantization, config.gated, packed, self.device, leave, outputs, both)
        packing = StoredPacking(self.dtype, self.device, config.gated, quantization, outside, leave, both)
        self.matrices |= packing.all_of(stored or {}, packed)
        self.tables = take_tables(weights, stored or {}, self.matrices, tied)
        self.outside = outside
        self.weights = weights if outside is None else weights | outside.settle()
        self.layers = self._layers(share, tensor)
        if outside is not None:
            served = [layer for layer in self.layers.layers if isinstance(layer, Layer)]
            outside.serve(served, self.device)
            self.matrices |= {f"layers.{each.index}.{name}": w for each in served for name, w in each.matrices.items()}
        dim, local_dim = config.rotated_heads
        self.rope = Rope(config.rope, dim, config.local_rope, local_dim) if config.rope else None
        self.embed_scale = torch.tensor(config.embed_scale, dtype=self.dtype)
        self.key_bias = alibi_bias(config.attention, config.max_model_len) if config.positions == "alibi" else None
        if self.key_bias is not None and share is not None:
            self.key_bias = self.key_bias[share.heads.start : share.heads.stop].clone()
        if self.key_bias is not None:
            self.key_bias = self.key_bias.to(self.device)
        self.sinks = self._sinks()
        self.adapters: Adapters | None = None
        self._ends = self._plain_ends()

    def _sinks(self) -> list[Tensor] | None:
        if not self.config.attention.sinks:
            return None
        return [self.weights[f"layers.{layer}.attention.sinks"].float() for layer in range(self.config.layers)]

    def _layers(self, share: Share | None, tensor: ShardGroup | None) -> block.Blocks | OneByOne:
        several = None if share is None or tensor is None else (share, tensor)
        layers = [
            layer_kind(self.config)(
                self.config, self.weights, self.matrices, index, Gathered(*several, index) if several else ALONE
            )
            for index in range(self.config.layers)
        ]
        if share is not None:
            reason: str | None = f"shared by {share.size} tensor ranks"
        else:
            reason = never_whole(self.config) or block.obstacle(layers, self.dtype, self.config.recurrent)
        if reason is None:
            return block.Blocks(shape_of(self.config), layers)
        tell_why_not_whole(share, reason)
        return one_by_one(layers)

    def first(self, count: int) -> Decoder:
        """A decoder of the first layers alone, with the same weights: for measurements."""
        part = copy.copy(self)
        part.config, part.layers = self.config.first(count), self.layers.first(count)
        part.sinks = self.sinks and self.sinks[:count]
        part._ends = None
        return part

    def unsent(self) -> Decoder:
        """A decoder of the first layer alone that exchanges nothing with other tensor ranks, whatever it computes: for
        measurements of `project`, which each rank makes at its own pace."""
        if self.share is None:
            return self
        alone, layer = copy.copy(self), copy.copy(self.layers.layers[0])
        assert isinstance(layer, Layer)
        layer.whole = Gathered(self.share, Unsent(self.share.rank, self.share.size))
        alone.layers = OneByOne([layer])
        return alone

    def _plain_ends(self) -> Ends | None:
        """What is beside the layers, where that is a table, a norm and a head, and all runs in C++."""
        config = self.config
        whole = config.head and config.final_norm and config.embed_size == config.hidden_size
        plain = whole and config.positions != "learned" and not config.rope_depends_on_length
        if not isinstance(self.layers, block.Blocks) or not plain:
            return None
        scales = (float(self.embed_scale), config.logit_scale, config.logit_cap)
        shape = replace(self.layers.shape, norm_offset=config.last_offset)
        return Ends(shape, self.tables[EMBED], self.weights, self.matrices, *scales, inputs=self._inputs_ends())

    def _inputs_ends(self) -> InputsEnds | None:
        """What makes the inputs of layers in C++, where layers have some."""
        spec = self.config.layer_inputs
        if spec is None:
            return None
        own, projected, both = input_scales(self.config, spec)
        scales = (float(torch.tensor(own, dtype=self.dtype)), projected, both)
        norm, projection = self.weights["layer_inputs_norm.weight"], self.matrices["layer_inputs.weight"]
        return InputsEnds(self.tables["layer_embed.weight"], projection, norm, self.config.norm_eps, scales)

    @property
    def runs_whole(self) -> bool:
        """Whether `prepare` can: all layers and what is beside them are C++."""
        return self._ends is not None and isinstance(self.layers, block.Blocks)

    def adapt(self, adapters: Adapters) -> None:
        """Has rows with these adapters from now on."""
        self.adapters = adapters
        for layer in self.layers.layers:
            assert isinstance(layer, Layer)
            layer.pairs = {name: placed(pairs) for name, pairs in adapters.of_layer(layer.index).items()}
        if isinstance(self.layers, block.Blocks):
            self.layers = block.Blocks(self.layers.shape, self.layers.layers)

    def prepare(self, positions: Tensor, attend: Attend, adapters: Tensor | None = None) -> ModelStep:
        """The step of rows at these positions, int64 [T], from tokens to logits in one call, and those behind it up to
        the ends of their chunks: the bits of `forward` and `logits`. adapters: as in TokenBatch. Raises ValueError
        unless `runs_whole` and `attend.prepared`.
        """
        if self._ends is None or attend.prepared is None or not isinstance(self.layers, block.Blocks):
            raise ValueError("this model, or its attention, is not computed in C++ as a whole")
        turns = self.rope.table(positions | (CHUNK - 1)) if self.rope else None
        layers = self.layers if adapters is None else self.layers.adapted_by(self._rows_of(adapters))
        return ModelStep(self._ends, layers, attend.prepared, turns)

    def forward(
        self,
        batch: TokenBatch,
        attend: Attend,
        rows: Tensor | None = None,
        watch: block.Watch | None = None,
        recur: Recur | None = None,
    ) -> Tensor:
        """Hidden states [T, E] of the batch, ready for `logits`. Calls attend(layer, q, k, v) once per layer, in order.

        rows, int64 [n], ascending: only their states are returned, [n, E], and nothing that no other row needs of the
        last layer is computed: no attention and no MLP (attend(layer, q, k, v, rows) then). None: all.
        k is handed over rotated; q, k and v may be views of one tensor, each row contiguous.

        watch(layer, x [T, H]) is called with the residual stream of all rows as it enters each layer, before its norm.
        x is overwritten afterwards: whoever needs it copies it.

        recur(layer, ...) is called by each recurrent layer in attend's place; layers are numbered by kind then.
        """
        x, cos_sin = self.enter(batch)
        return self.leave(self.through(batch.token_ids, x, cos_sin, attend, rows, watch, recur, batch.adapters))

    def _rows_of(self, numbers: Tensor) -> AdaptedRows:
        """Rows that have the adapters of these numbers, [T]."""
        if self.adapters is None:
            raise ValueError("the step has rows with an adapter, and this decoder has none")
        return AdaptedRows(numbers)

    def through(
        self,
        token_ids: Tensor,
        x: Tensor,
        cos_sin: Tensor | None,
        attend: Attend,
        rows: Tensor | None = None,
        watch: block.Watch | None = None,
        recur: Recur | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """The residual stream [T, H] behind the last layer, of tokens [T] that enter the first as x [T, H]. adapters:
        as in TokenBatch, maybe on the device. The other arguments are those of `forward`."""
        layers = self.layers if adapters is None else self.layers.adapted_by(self._rows_of(adapters))
        inputs = self._inputs(token_ids, x)
        if inputs is None:
            return layers(x, cos_sin, attend, rows, watch, recur)
        assert isinstance(layers, block.Blocks | MixedLayers), "other layers have no inputs"
        return layers(x, cos_sin, attend, rows, watch, inputs=inputs)

    def enter(self, batch: TokenBatch) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, H] that enters the first layer, and the rotation of each row (None for none)."""
        turns = self.rope.at(batch.positions, batch.rope_lengths).to(self.device) if self.rope else None
        tokens, positions = batch.token_ids.to(self.device), batch.positions.to(self.device)
        return entered(self.config, self.embed(tokens, positions)), turns

    def _inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """What each layer adds of tokens [T], which enter as x [T, H]; None where layers add nothing."""
        if self.config.layer_inputs is None:
            return None
        spec, table = self.config.layer_inputs, self.tables["layer_embed.weight"]
        tokens = token_ids.to(self.device)
        return layer_inputs(self.config, spec, table, self.weights, self.matrices, tokens, x)

    def leave(self, x: Tensor) -> Tensor:
        """The residual stream [T, H] behind the last layer -> hidden states [T, E], as `forward` returns them."""
        if not len(x):
            return x.new_empty(0, self.config.embed_size)
        x = left(self.config, self.weights, x)
        if self.config.final_norm:
            x = norm(self.config, self.weights, "final_norm", x)
        return ops.linear(x, self.matrices["project_out.weight"]) if "project_out.weight" in self.matrices else x

    def project(self, layer: int, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """k and v [n, Hkv, D] of a layer from what enters it, x [n, H] (see `forward`, watch): those that `forward`
        hands to attend for these rows, to the bit.

        positions, int64 [n], absolute; lengths [n]: as TokenBatch.rope_lengths. k and v may be views of one tensor.
        """
        cos_sin = self.rope.at(positions, lengths).to(self.device) if self.rope else None
        return self.layers.project(layer, x, cos_sin)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> fp32 [R, V]. Raises ValueError for a model, and on a tensor rank, without a head."""
        if not self.config.head:
            raise ValueError(f"{self.config.architecture} has no head over the vocabulary, and so no logits")
        if HEAD not in self.matrices:
            raise ValueError("this tensor rank has no head; ask rank 0 of its group for logits")
        logits = ops.linear(hidden, self.matrices[HEAD], self.weights.get(HEAD_BIAS), wide=True)
        if self.config.logit_scale == 1.0 and self.config.logit_cap is None:
            return logits
        return ops.soft_cap(logits, self.config.logit_scale, self.config.logit_cap)

    def classify(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> fp32 [R, labels], before any softmax, of a model with a classifier's head."""
        return ops.linear(hidden, self.matrices[CLASSIFIER], wide=True)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The residual stream [T, H] of tokens [T] at positions [T], whole numbers, on the decoder's device."""
        x = ops.look_up(self.tables[EMBED], token_ids, self.dtype)
        if self.config.embed_scale != 1.0:
            x = x * self.embed_scale
        if "project_in.weight" in self.matrices:
            x = ops.linear(x, self.matrices["project_in.weight"])
        if self.config.positions == "learned":
            rows = positions + self.config.positions_from
            x = x + ops.look_up(self.tables["positions.weight"], rows, self.dtype)
        return x


def _share(config: ModelConfig, tensor: ShardGroup | None, on_gpu: bool) -> Share | None:
    """What this rank computes; None: everything. Raises ValueError as Share and check_shared do."""
    if tensor is None or tensor.size == 1:
        return None
    check_shared(config, tensor.size, on_gpu)
    return Share(config, tensor.rank, tensor.size)


def _tell_of_rows(config: ModelConfig, device: torch.device | None) -> None:
    """Where rows are not rounded though the file asks for it."""
    scheme = None if config.stored is None else config.stored.scheme
    on_cpu = device is None or device.type == "cpu"
    for each in () if scheme is None or not on_cpu or dispatch.in_cpp() else scheme.every:
        if each.rounds_rows:
            log.warning("%s: only the C++ kernels and a GPU round activations; the weights alone are used", each.name)


def compute_dtype(config: ModelConfig, dtype: Literal["auto", "bfloat16", "float32"]) -> torch.dtype:
    """The type that is computed in where `dtype` is asked for."""
    return DTYPES[config.dtype if dtype == "auto" else dtype]


def load_decoder(
    folder: str | Path,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    progress: OnProgress | None = None,
    quantization: Quantization = "none",
    tensor: ShardGroup | None = None,
    device: torch.device | None = None,
    packed: OnProgress | None = None,
    outside: ExpertsPlace | None = None,
    facts: ModelConfig | None = None,
    leave: Leave | None = None,
    adapters: Sequence[AdapterFacts] = (),
) -> Decoder:
    """Reads the model in `folder`; `auto` computes in the checkpoint's type, float16 as bfloat16.

    `quantization` rounds every matrix that rows are multiplied by, the head among them, and with w8a8 the rows too
    (fp8_rowwise: both, of feed-forward layers alone); embeddings, norms and biases stay. progress and packed are told
    of bytes, as weights are read and then as matrices are packed. With `tensor` only this rank's share is read and
    kept. device: of the weights and of all that is computed; the CPU, if it is not given. outside: takes the experts
    one by one, so that memory never holds them all. facts: of the model, if they have been read. leave: see Decoder.
    adapters: those that rows may have, by their numbers.
    Raises UnsupportedModel naming what Headrace does not implement, ValueError for a folder that is not sound or a
    model that the ranks cannot share.
    """
    if dtype not in ("auto", "bfloat16", "float32"):
        raise ValueError(f"dtype must be auto, bfloat16 or float32, got {dtype!r}")
    if quantization not in get_args(Quantization):
        raise ValueError(f"quantization must be one of {', '.join(get_args(Quantization))}, got {quantization!r}")
    config = facts or read_config(folder)
    refuse_rounding(config, quantization)
    _tell_of_rows(config, device)
    compute = compute_dtype(config, dtype)
    stored: dict[str, StoredMatrix] = {}
    on_gpu = device is not None and dispatch.on_gpu(torch.empty(0, device=device))
    share, later = _share(config, tensor, on_gpu), outside is not None
    in_cpp = (device is None or device.type == "cpu") and dispatch.native(torch.empty(0, dtype=compute))
    weights = load_weights(Path(folder), config, compute, progress, share, stored, later, tables_later=in_cpp)
    if device is not None and device.type != "cpu":
        one_by_one = set(multiplied(weights))  # moved as they are packed
        weights = {name: w if name in one_by_one else w.to(device) for name, w in weights.items()}
    decoder = Decoder(config, weights, quantization, tensor, packed, stored, outside, leave, compute)
    if adapters:
        decoder.adapt(load_adapters(adapters, config, compute, share, decoder.device))
    del weights, stored
    give_back()
    return decoder
