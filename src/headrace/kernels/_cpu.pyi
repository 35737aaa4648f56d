"""The C++ extension as csrc's binding defines it. Tensors come as addresses, 0 for none; sizes in elements.

type: 0 for bf16, 1 for fp32 (extension.TYPES). threads: at most so many. Addresses stay those of the caller's tensors.
"""

from collections.abc import Sequence
from typing import Protocol

class Pool:
    """kernels.records.Pool; no k: v holds activations."""

    def __init__(self, k: int, v: int, k_scale: int, v_scale: int, *, slots: int, kv_heads: int, dim: int) -> None: ...

class Mask:
    """kernels.records.Mask. count: of the items. window: 0 for none."""

    def __init__(
        self,
        items: int,
        positions: int,
        bias: int,
        sinks: int,
        *,
        count: int,
        window: int,
        bias_len: int,
        scale: float,
        cap: float,
    ) -> None: ...

class Order:
    pre: Order
    post: Order
    parallel: Order
    sandwich: Order

class Gate:
    """What gates pass through in a product with a gated matrix."""

    silu: Gate
    gelu_tanh: Gate
    swiglu_oai: Gate
    swiglu_clamped: Gate

class Activation:
    """Its members are named in csrc/kernels.h, HEADRACE_ACTIVATIONS; the module has a function of each name, with the
    arguments of silu_mul, and xielu the address of its two numbers besides."""

class Form:
    """How a weight lies: named in csrc/kernels.h, HEADRACE_FORMS."""

    plain: Form
    pairs: Form

class Element:
    bf16: Element
    fp32: Element
    int8: Element

class Format:
    """How chunks are stored."""

    raw: Format
    int8: Format
    int4: Format

class Number:
    """How scales are stored (kernels.formats): named in csrc/kernels.h, HEADRACE_NUMBERS."""

    fp32: Number

class Subs:
    """What sub-scales are: named in csrc/kernels.h, HEADRACE_SUBS."""

    none: Subs

class Offset:
    """What is added to a code times its scale: named in csrc/kernels.h, HEADRACE_OFFSETS."""

    none: Offset

class Scaling:
    """kernels.formats.Format. run: see kernels.quantized.run_of. Raises ValueError for sizes that do not divide."""

    def __init__(self, number: Number, offset: Offset, *, subs: Subs, block: int, group: int, run: int) -> None: ...

class Matrix:
    """order: of the inputs, int32 [inputs], or 0."""

    def __init__(
        self,
        form: Form,
        weight: int,
        scales: int,
        bias: int,
        *,
        inputs: int,
        outputs: int,
        gated: bool,
        scaling: Scaling,
        order: int,
    ) -> None: ...
    def adapted(self, numbers: Sequence[int], down: Sequence[Matrix], up: Sequence[Matrix], *, count: int) -> Matrix:
        """The same with what adapters of these numbers, of `count`, add to its products."""
    @staticmethod
    def of_parts(parts: Sequence[Matrix], bias: int, *, inputs: int, outputs: int) -> Matrix:
        """Outputs one part after another; the parts have no biases of their own."""

class Scale:
    def __init__(self, rms: bool, weight: int, bias: int, offset: float) -> None: ...

class Routing:
    """config.RoutingSpec."""

    def __init__(self, *, sigmoid: bool, groups: int, met_groups: int, summed: int, scale: float) -> None: ...

class Experts:
    def __init__(
        self,
        router: Matrix,
        up: Sequence[Matrix],
        down: Sequence[Matrix],
        *,
        chosen: int,
        normalised: bool,
        routing: Routing,
        correction: int,
        weighted_inputs: bool = False,
        shared: Sequence[Matrix] = (),
        outside: int = 0,
        scales: int = 0,
    ) -> None:
        """shared: up, down and maybe a gate of the expert that all rows meet. scales: of shares, by expert."""

class DeltaNet:
    def __init__(
        self,
        gates: Matrix,
        vectors: Sequence[int],
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
    ) -> None:
        """vectors: conv, rate, dt_bias and norm."""

class MambaNet:
    def __init__(
        self,
        gates: Matrix,
        vectors: Sequence[int],
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
    ) -> None:
        """vectors: conv, its bias or 0, rate, dt_bias, skip and norm."""

class ShortConvolution:
    def __init__(self, conv: int, *, channels: int, kernel: int) -> None: ...

class BesideMlp:
    def __init__(
        self, router_norm: Scale, experts_norm: Scale, dense_out_norm: Scale, experts_out_norm: Scale, factor: float
    ) -> None: ...

class LayerInputs:
    def __init__(self, gate: Matrix, out: Matrix, norm: Scale) -> None: ...

class InputsTable:
    def __init__(
        self,
        *,
        table: int,
        vocabulary: int,
        packed: Matrix | None,
        projection: Matrix,
        norm: int,
        width: int,
        eps: float,
        table_scale: float,
        projected_scale: float,
        sum_scale: float,
    ) -> None: ...

class Beside:
    def __init__(self, mixed: Matrix, out: Matrix, times: Sequence[float]) -> None:
        """times: of z, gates, out, recurrent_out, up and down (models.layer_parts.Multipliers)."""

class Latent:
    def __init__(
        self,
        queries: Matrix,
        keys: Sequence[Matrix],
        values: Sequence[Matrix],
        *,
        latent_norm: int,
        eps: float,
        query_in: Matrix | None = None,
        query_norm: int = 0,
    ) -> None:
        """keys, values: one of each head. query_norm: of what `query_in` makes."""

class RecurrentStates:
    def __init__(self, layers: Sequence[tuple[int, int]], slots: int) -> None:
        """layers: addresses of `last` and `matrices` of each."""

class Block:
    def __init__(
        self,
        *,
        order: Order,
        activation: Activation,
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
        qkv: Matrix,
        out: Matrix,
        up: Matrix | None,
        down: Matrix | None,
        attention_norm: Scale,
        mlp_norm: Scale,
        q_norm: int,
        k_norm: int,
        out_norms: Sequence[Scale],
        turn_first: int,
        turned: int,
        residual_scale: float,
        out_eps: float,
        norm_whole: bool = False,
        experts: Experts | None = None,
        gated: bool = False,
        net: DeltaNet | None = None,
        query_first: int = -1,
        turn_before_norm: bool = False,
        latent: Latent | None = None,
        convolution: ShortConvolution | None = None,
        mamba: MambaNet | None = None,
        alphas: int = 0,
        beside: Beside | None = None,
        v_norm: int = 0,
        keys_as_values: bool = False,
        beside_mlp: BesideMlp | None = None,
        inputs: LayerInputs | None = None,
        scale: float = 1.0,
    ) -> None:
        """query_first: where the rotation of queries begins; below 0: where that of keys does. alphas: of xielu."""

    def scratch(self, rows: int) -> int: ...
    def mixed_size(self, rows: int) -> int: ...
    def mixed_at(self, rows: int) -> int: ...
    def gates_at(self, rows: int) -> int: ...
    def attended_size(self, rows: int) -> int: ...
    def recurred_at(self, rows: int) -> int: ...
    def before(
        self,
        x: int,
        cos_sin: int,
        qkv: int,
        scratch: int,
        *,
        rotary: int,
        rows: int,
        threads: int,
        adapted: int = 0,
    ) -> None: ...
    def after(
        self,
        x: int,
        attended: int,
        scratch: int,
        rows: int,
        threads: int,
        *,
        gates: int = 0,
        gates_stride: int = 0,
        adapted: int = 0,
        inputs: int = 0,
        inputs_stride: int = 0,
    ) -> None: ...

class AttentionStep:
    def __init__(
        self,
        type: int,
        positions: int,
        slots: int,
        offsets: int,
        bias: int,
        *,
        bias_len: int,
        rows: int,
        heads: int,
        kv_heads: int,
        dim: int,
        slot_count: int,
        scale: float,
        cap: float,
        threads: int,
    ) -> None: ...
    def add_items(self, items: int, count: int, window: int) -> int: ...
    def go_on(self, positions: int, offsets: int, threads: int) -> None: ...
    def go_on_by_one(self, threads: int) -> None: ...

class StepLayer:
    def __init__(
        self, step: AttentionStep, kind: int, k_pool: int, v_pool: int, sinks: int, stores: bool = True
    ) -> None: ...
    def run(self, q: int, k: int, v: int, out: int, *, q_stride: int, k_stride: int, v_stride: int) -> None: ...

class Ends:
    def __init__(
        self,
        embed: int,
        vocabulary: int,
        norm: Scale,
        eps: float,
        head: Matrix,
        *,
        embed_scale: float,
        logit_scale: float,
        logit_cap: float,
        packed: Matrix | None = None,
        inputs: InputsTable | None = None,
    ) -> None: ...

class ModelStep:
    def __init__(
        self,
        ends: Ends,
        blocks: Sequence[Block],
        step: AttentionStep,
        layers: Sequence[StepLayer],
        *,
        turns: int,
        turn_rows: int,
        rotary: int,
        adapted: int = 0,
    ) -> None: ...
    def scratch(self) -> int: ...
    def run(
        self,
        tokens: Sequence[int],
        scratch: int,
        logits: int,
        threads: int,
        states: RecurrentStates | None = None,
        segments: int = 0,
        count: int = 0,
    ) -> tuple[list[float], list[int]]: ...

# Inside the class below these names are its members.
_Pool = Pool
_Mask = Mask
_Matrix = Matrix
_Gate = Gate
_Routing = Routing
_Number = Number
_Subs = Subs
_Offset = Offset
_Scaling = Scaling
_Element = Element
_Format = Format
_Block = Block
_StepLayer = StepLayer
_RecurrentStates = RecurrentStates

class Extension(Protocol):
    """The module."""

    @property
    def Pool(self) -> type[Pool]: ...
    @property
    def Mask(self) -> type[Mask]: ...
    @property
    def Order(self) -> type[Order]: ...
    @property
    def Gate(self) -> type[Gate]: ...
    @property
    def Activation(self) -> type[Activation]: ...
    @property
    def Form(self) -> type[Form]: ...
    @property
    def Element(self) -> type[Element]: ...
    @property
    def Format(self) -> type[Format]: ...
    @property
    def Number(self) -> type[_Number]: ...
    @property
    def Subs(self) -> type[_Subs]: ...
    @property
    def Offset(self) -> type[_Offset]: ...
    @property
    def Scaling(self) -> type[_Scaling]: ...
    @property
    def Matrix(self) -> type[Matrix]: ...
    @property
    def Scale(self) -> type[Scale]: ...
    @property
    def Routing(self) -> type[Routing]: ...
    @property
    def Block(self) -> type[Block]: ...
    @property
    def Experts(self) -> type[Experts]: ...
    @property
    def Beside(self) -> type[Beside]: ...
    @property
    def BesideMlp(self) -> type[BesideMlp]: ...
    @property
    def LayerInputs(self) -> type[LayerInputs]: ...
    @property
    def InputsTable(self) -> type[InputsTable]: ...
    @property
    def StepLayer(self) -> type[StepLayer]: ...
    @property
    def AttentionStep(self) -> type[AttentionStep]: ...
    @property
    def DeltaNet(self) -> type[DeltaNet]: ...
    @property
    def MambaNet(self) -> type[MambaNet]: ...
    @property
    def ShortConvolution(self) -> type[ShortConvolution]: ...
    @property
    def Latent(self) -> type[Latent]: ...
    @property
    def RecurrentStates(self) -> type[RecurrentStates]: ...
    @property
    def Ends(self) -> type[Ends]: ...
    @property
    def ModelStep(self) -> type[ModelStep]: ...
    def attend(
        self,
        type: int,
        q: int,
        pool: _Pool,
        mask: _Mask,
        out: int,
        *,
        rows: int,
        q_stride: int,
        heads: int,
        start: Sequence[int],
        left: Sequence[int],
        threads: int,
    ) -> None:
        """start and left: a RunningState each (cpu_attention.addresses), or nothing. Fills `left`, or `out`."""
    def append(
        self,
        type: int,
        pool: _Pool,
        k_new: int,
        v_new: int,
        slots: int,
        offsets: int,
        *,
        rows: int,
        k_stride: int,
        v_stride: int,
        threads: int,
    ) -> None: ...
    def index_scores(
        self,
        type: int,
        pool: _Pool,
        q: int,
        weights: int,
        items: int,
        positions: int,
        out: int,
        *,
        rows: int,
        count: int,
        heads: int,
        size: int,
        keys: int,
        threads: int,
        pooled: int = 1,
        places: int = 0,
    ) -> None:
        """See kernels.indexer. count: of the items; size: of an indexer's head; keys: columns of `out`, in pools."""
    def block_scores(
        self,
        type: int,
        pool: _Pool,
        q: int,
        items: int,
        positions: int,
        out: int,
        *,
        rows: int,
        count: int,
        size: int,
        chunks: int,
        threads: int,
    ) -> None:
        """See kernels.indexer. count: of the items; size: of an indexer's head; chunks: columns of `out`."""
    def gather(
        self,
        type: int,
        pool: _Pool,
        to: _Pool,
        tables: int,
        chosen: int,
        *,
        rows: int,
        count: int,
        table: int,
        chunks: int,
        threads: int,
    ) -> None:
        """See kernels.indexer. table: columns of `tables`; chunks: of each row in `to`."""
    def finish(
        self,
        type: int,
        state: Sequence[int],
        out: int,
        lse: int,
        sinks: int,
        *,
        lanes: int,
        heads: int,
        dim: int,
        base2: bool,
        threads: int,
    ) -> None: ...
    def merge_partials(
        self, total: Sequence[int], block: Sequence[int], *, lanes: int, dim: int, base2: bool, threads: int
    ) -> None: ...
    def merge_states(
        self,
        left: tuple[int, int],
        right: tuple[int, int],
        merged: tuple[int, int],
        *,
        lanes: int,
        dim: int,
        threads: int,
    ) -> None: ...
    def rms_norm(
        self,
        type: int,
        x: int,
        weight: int,
        out: int,
        *,
        rows: int,
        width: int,
        eps: float,
        offset: float,
        threads: int,
    ) -> None: ...
    def gated_delta(
        self,
        type: int,
        mixed: int,
        gates: int,
        vectors: Sequence[int],
        states: Sequence[int],
        segments: int,
        out: int,
        *,
        rows: int,
        mixed_stride: int,
        count: int,
        slots: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
        threads: int,
        by_channel: bool,
        bound: float,
    ) -> None:
        """vectors: conv, rate, dt_bias and norm; states: last and matrices (csrc/kernels.h, GatedDelta)."""
    def mamba2(
        self,
        type: int,
        mixed: int,
        gates: int,
        vectors: Sequence[int],
        states: Sequence[int],
        segments: int,
        out: int,
        *,
        rows: int,
        mixed_stride: int,
        count: int,
        slots: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
        threads: int,
    ) -> None:
        """vectors: conv, its bias or 0, rate, dt_bias, skip and norm; states: last and matrices (kernels.h, Mamba2)."""
    def short_conv(
        self,
        type: int,
        mixed: int,
        conv: int,
        last: int,
        segments: int,
        out: int,
        *,
        rows: int,
        mixed_stride: int,
        count: int,
        slots: int,
        channels: int,
        kernel: int,
        threads: int,
    ) -> None:
        """csrc/kernels.h, ShortConv."""
    def layer_norm(
        self, type: int, x: int, weight: int, bias: int, out: int, *, rows: int, width: int, eps: float, threads: int
    ) -> None: ...
    def collect_streams(
        self,
        type: int,
        x: int,
        mixing: Sequence[int],
        out: int,
        post: int,
        comb: int,
        *,
        rows: int,
        streams: int,
        width: int,
        eps: float,
        least: float,
        magnitude: float,
        post_least: float,
        rounds: int,
        threads: int,
    ) -> None:
        """mixing: mixes, base and scale (csrc/kernels.h, CollectStreams)."""
    def spread_streams(
        self,
        type: int,
        x: int,
        part: int,
        post: int,
        comb: int,
        out: int,
        *,
        rows: int,
        streams: int,
        width: int,
        threads: int,
    ) -> None: ...
    def silu_mul(self, type: int, x: int, out: int, rows: int, width: int, threads: int) -> None: ...
    def rotary(
        self,
        type: int,
        x: int,
        cos_sin: int,
        out: int,
        *,
        rows: int,
        x_stride: int,
        heads: int,
        dim: int,
        width: int,
        turn_stride: int,
        threads: int,
    ) -> None: ...
    def soft_cap(self, x: int, n: int, scale: float, cap: float, threads: int) -> None: ...
    def greatest(self, x: int, value: int, index: int, rows: int, width: int, threads: int) -> None: ...
    def softmax_sums(
        self, x: int, target: int, greatest: int, sum: int, above: int, rows: int, width: int, threads: int
    ) -> None: ...
    def linear(
        self,
        type: int,
        x: int,
        matrix: _Matrix,
        out: int,
        *,
        rows: int,
        x_stride: int,
        wide: bool,
        gate: _Gate,
        threads: int,
    ) -> None: ...
    def packed_rows(self, type: int, matrix: _Matrix, index: int, out: int, *, rows: int, threads: int) -> None: ...
    def linear_groups(
        self,
        type: int,
        x: int,
        matrices: Sequence[_Matrix],
        begin: Sequence[int],
        out: int,
        *,
        rows: int,
        x_stride: int,
        gate: _Gate,
        threads: int,
    ) -> None: ...
    def route(
        self,
        x: int,
        expert: int,
        share: int,
        routing: _Routing,
        correction: int,
        *,
        rows: int,
        experts: int,
        chosen: int,
        normalised: bool,
        threads: int,
    ) -> None: ...
    def combine(
        self, type: int, y: int, place: int, share: int, out: int, *, rows: int, chosen: int, width: int, threads: int
    ) -> None: ...
    def move_chunks(
        self,
        fits: int,
        sections: int,
        slots: int,
        pool: _Pool,
        *,
        stride: int,
        count: int,
        element: _Element,
        format: _Format,
        vnni: bool,
    ) -> None:
        """Stores, with room for `fits`; loads without."""
    def exp(self, x: int, out: int, n: int) -> None: ...
    def probe_read(self, data: int, bytes: int, threads: int) -> None: ...
    def probe_multiply(self, rounds: int, threads: int) -> int: ...
    def probe_handover(self, rounds: int) -> bool: ...
    def available_isas(self) -> str: ...
    def built_isas(self) -> str: ...
    def isa(self) -> str: ...
    def use_isa(self, name: str) -> None: ...
    def use_l1(self, kilobytes: int) -> None: ...
    def run_blocks(
        self,
        blocks: Sequence[_Block],
        layers: Sequence[_StepLayer],
        x: int,
        qkv: int,
        attended: int,
        scratch: int,
        states: _RecurrentStates | None,
        segments: int,
        count: int,
        *,
        cos_sin: int,
        rotary: int,
        rows: int,
        threads: int,
        adapted: int = 0,
        inputs: int = 0,
        inputs_stride: int = 0,
    ) -> None: ...
