// Layers of a decoder, all of them, and a step from tokens to logits.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "binding/binding.h"

namespace headrace {

namespace {

void make_scale(Scale *self, bool rms, Address weight, Address bias, float offset) {
  new (self) Scale{rms, at<bf16>(weight), at<bf16>(bias), offset};
}

// shared: up, down and maybe a gate of the expert that all rows meet; or none.
void make_experts(Experts *self, const Matrix &router, const Matrices &up, const Matrices &down, int64_t chosen,
                  bool normalised, const Routing &routing, Address correction, bool weighted_inputs, const Matrices &shared,
                  Address outside, Address scales) {
  const int64_t count = router.outputs;
  if (static_cast<int64_t>(up.size()) != count || up.size() != down.size())
    refuse("a router of ", count, " experts does not fit ", static_cast<int64_t>(up.size()), " and ",
           static_cast<int64_t>(down.size()), " matrices");
  check_routing(routing, count, chosen);
  check_shapes(up);
  check_shapes(down);
  if (!shared.empty() && shared.size() != 2 && shared.size() != 3) refuse("a shared expert has up, down and maybe a gate");
  new (self) Experts{router,
                     up,
                     down,
                     chosen,
                     normalised,
                     routing,
                     at<float>(correction),
                     at<float>(scales),
                     weighted_inputs,
                     shared,
                     at<OutsideExpert>(outside)};
}

// vectors: as of gated_delta.
void make_net(DeltaNet *self, const Matrix &gates, const Addresses &vectors, int64_t key_heads, int64_t value_heads,
              int64_t key_dim, int64_t value_dim, int64_t kernel, float eps) {
  new (self) DeltaNet{gates,
                      at<float>(vectors.at(0)),
                      at<float>(vectors.at(1)),
                      at<float>(vectors.at(2)),
                      at<float>(vectors.at(3)),
                      key_heads,
                      value_heads,
                      key_dim,
                      value_dim,
                      kernel,
                      eps};
}

// vectors: as of mamba2.
void make_mamba(MambaNet *self, const Matrix &gates, const Addresses &vectors, int64_t key_heads, int64_t value_heads,
                int64_t key_dim, int64_t value_dim, int64_t kernel, float eps) {
  new (self) MambaNet{gates,
                      at<float>(vectors.at(0)),
                      at<float>(vectors.at(1)),
                      at<float>(vectors.at(2)),
                      at<float>(vectors.at(3)),
                      at<float>(vectors.at(4)),
                      at<float>(vectors.at(5)),
                      key_heads,
                      value_heads,
                      key_dim,
                      value_dim,
                      kernel,
                      eps};
}

void make_convolution(ShortConvolution *self, Address conv, int64_t channels, int64_t kernel) {
  if (kernel < 1 || kernel > ShortConv::MOST_INPUTS) refuse("a convolution of ", kernel, " inputs");
  new (self) ShortConvolution{at<float>(conv), channels, kernel};
}

// query_in: none where queries are made of x. query_norm: of its outputs.
void make_latent(Latent *self, const Matrix &queries, const Matrices &keys, const Matrices &values, Address latent_norm,
                 float eps, const Matrix *query_in, Address query_norm) {
  new (self) Latent{query_in ? std::optional<Matrix>(*query_in) : std::nullopt,
                    queries,
                    keys,
                    values,
                    at<bf16>(query_norm),
                    at<bf16>(latent_norm),
                    eps};
}

// times: of Beside, in its order.
void make_beside(Beside *self, const Matrix &mixed, const Matrix &out, const std::vector<float> &times) {
  if (times.size() != 6) refuse("a layer beside attention has six factors");
  new (self) Beside{mixed, out, {times[0], times[1], times[2], times[3], times[4], times[5]}};
}

void make_beside_mlp(BesideMlp *self, const Scale &router_norm, const Scale &experts_norm, const Scale &dense_out_norm,
                     const Scale &experts_out_norm, float factor) {
  new (self) BesideMlp{router_norm, experts_norm, dense_out_norm, experts_out_norm, factor};
}

void make_inputs(LayerInputs *self, const Matrix &gate, const Matrix &out, const Scale &norm) {
  new (self) LayerInputs{gate, out, norm};
}

void make_inputs_table(InputsTable *self, Address table, int64_t vocabulary, const Matrix *packed, const Matrix &projection,
                       Address norm, int64_t width, float eps, float table_scale, float projected_scale, float sum_scale) {
  if (width < 1 || projection.outputs % width) refuse("inputs of ", width, " numbers do not fill ", projection.outputs);
  new (self) InputsTable{at<bf16>(table),
                         vocabulary,
                         packed ? std::optional<Matrix>(*packed) : std::nullopt,
                         projection,
                         at<bf16>(norm),
                         width,
                         eps,
                         table_scale,
                         projected_scale,
                         sum_scale};
}

// layers: where `last` and `matrices` of each lie.
void make_states(RecurrentStates *self, const std::vector<std::pair<Address, Address>> &layers, int64_t slots) {
  RecurrentStates states = {{}, slots};
  for (const auto &[last, matrices] : layers) states.layers.push_back({at<void>(last), at<float>(matrices)});
  new (self) RecurrentStates(states);
}

// up, down: none of a layer without an MLP. out_norms: those of Order::sandwich and after, of attention and of the MLP; otherwise
// none. query_first: below 0, turn_first.
void make_block(DecoderLayer *self, Order order, Activation activation, int64_t heads, int64_t kv_heads, int64_t dim, float eps,
                const Matrix &qkv, const Matrix &out, const Matrix *up, const Matrix *down, const Scale &attention_norm,
                const Scale &mlp_norm, Address q_norm, Address k_norm, const std::vector<Scale> &out_norms, int64_t turn_first,
                int64_t turned, float residual_scale, float out_eps, bool norm_whole, const Experts *experts, bool gated,
                const DeltaNet *net, int64_t query_first, bool turn_before_norm, const Latent *latent,
                const ShortConvolution *convolution, const MambaNet *mamba, Address alphas, const Beside *beside,
                Address v_norm, bool keys_as_values, const BesideMlp *beside_mlp, const LayerInputs *inputs, float scale) {
  const bool normed = order == Order::sandwich || order == Order::after;
  if (out_norms.size() != (normed ? 2 : 0)) refuse("a block of this order has other norms");
  if (beside && (order != Order::pre || !mamba || residual_scale != 1.0f)) refuse("such a block has nothing beside attention");
  if ((beside_mlp || inputs || scale != 1.0f) && order != Order::sandwich) refuse("only a sandwich has parts behind its MLP");
  if (beside_mlp && !experts) refuse("there are no experts beside the MLP");
  if (beside_mlp && !experts->shared.empty()) refuse("experts beside an MLP have none that all rows meet");
  if (!up != !down || (!up && (experts || order != Order::pre))) refuse("a block of this order has an MLP");
  new (self) DecoderLayer{
      .order = order,
      .activation = activation,
      .alphas = at<float>(alphas),
      .heads = heads,
      .kv_heads = kv_heads,
      .dim = dim,
      .eps = eps,
      .qkv = qkv,
      .out = out,
      .up = up ? *up : Matrix{},
      .down = down ? *down : Matrix{},
      .experts = experts ? *experts : Experts{},
      .attention_norm = attention_norm,
      .mlp_norm = mlp_norm,
      .attention_out_norm = out_norms.empty() ? Scale{} : out_norms[0],
      .mlp_out_norm = out_norms.empty() ? Scale{} : out_norms[1],
      .out_eps = out_eps,
      .q_norm = at<bf16>(q_norm),
      .k_norm = at<bf16>(k_norm),
      .v_norm = at<bf16>(v_norm),
      .keys_as_values = keys_as_values,
      .norm_whole = norm_whole,
      .turn_first = turn_first,
      .turned = turned,
      .query_first = query_first < 0 ? turn_first : query_first,
      .turn_before_norm = turn_before_norm,
      .residual_scale = residual_scale,
      .gated = gated,
      .net = net ? std::optional<DeltaNet>(*net) : std::nullopt,
      .mamba = mamba ? std::optional<MambaNet>(*mamba) : std::nullopt,
      .convolution = convolution ? std::optional<ShortConvolution>(*convolution) : std::nullopt,
      .latent = latent ? std::optional<Latent>(*latent) : std::nullopt,
      .beside = beside ? std::optional<Beside>(*beside) : std::nullopt,
      .beside_mlp = beside_mlp ? std::optional<BesideMlp>(*beside_mlp) : std::nullopt,
      .inputs = inputs ? std::optional<LayerInputs>(*inputs) : std::nullopt,
      .scale = scale,
  };
}

void before(const DecoderLayer &self, Address x, Address cos_sin, Address qkv, Address scratch, int64_t rotary, int64_t rows,
            int threads, Address adapted) {
  self.before(at<bf16>(x), at<float>(cos_sin), rotary, at<bf16>(qkv), at<bf16>(scratch), rows, threads, at<int64_t>(adapted));
}

void after(const DecoderLayer &self, Address x, Address attended, Address scratch, int64_t rows, int threads, Address gates,
           int64_t gates_stride, Address adapted, Address inputs, int64_t inputs_stride) {
  self.after(at<bf16>(x), at<bf16>(attended), at<bf16>(scratch), rows, threads, {at<bf16>(gates), gates_stride},
             at<int64_t>(adapted), {at<bf16>(inputs), inputs_stride});
}

// bias_len: positions that the bias covers.
void make_step(AttentionStep *self, int type, Address positions, Address slots, Address offsets, Address bias, int64_t bias_len,
               int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t slot_count, float scale, float cap,
               int threads) {
  Attend attend = {};
  attend.positions = at<int64_t>(positions);
  attend.bias = at<float>(bias);
  attend.bias_len = bias_len;
  attend.rows = rows;
  attend.heads = heads;
  attend.kv_heads = kv_heads;
  attend.dim = dim;
  attend.scale = scale;
  attend.cap = cap;
  attend.threads = threads;
  Append append = {};
  append.slots = at<int32_t>(slots);
  append.offsets = at<int32_t>(offsets);
  append.rows = rows;
  append.kv_heads = kv_heads;
  append.dim = dim;
  append.threads = threads;
  new (self) AttentionStep(type, attend, append, slot_count);
}

int64_t add_items(AttentionStep &self, Address items, int64_t count, int64_t window) {
  return self.add_items(at<Item>(items), count, window);
}

void go_on(AttentionStep &self, Address positions, Address offsets, int threads) {
  self.go_on(at<int64_t>(positions), at<int32_t>(offsets), threads);
}

void go_on_by_one(AttentionStep &self, int threads) { self.go_on(threads); }

void make_layer(AttentionStep::Layer *self, const AttentionStep &step, int64_t kind, Address k_pool, Address v_pool,
                Address sinks, bool stores) {
  new (self) AttentionStep::Layer{&step, kind, at<void>(k_pool), at<void>(v_pool), at<float>(sinks), stores};
}

void run(const AttentionStep::Layer &self, Address q, Address k, Address v, Address out, int64_t q_stride, int64_t k_stride,
         int64_t v_stride) {
  self.run({at<void>(q), q_stride}, {at<void>(k), k_stride}, {at<void>(v), v_stride}, at<void>(out));
}

typedef std::vector<AttentionStep::Layer> Layers;

size_t attentions(const Blocks &blocks) {
  size_t count = 0;
  for (const DecoderLayer *block : blocks) count += block->attends();
  return count;
}

// Numbers of all inputs of a row.
int64_t inputs_width(const Blocks &blocks) {
  int64_t width = 0;
  for (const DecoderLayer *block : blocks) width += block->inputs ? block->inputs->gate.outputs : 0;
  return width;
}

// layers: one for each block with attention, or more. states, and segments of which there are `count`: of the recurrent ones.
void run_blocks(const Blocks &blocks, const Layers &layers, Address x, Address qkv, Address attended, Address scratch,
                const RecurrentStates *states, Address segments, int64_t count, Address cos_sin, int64_t rotary, int64_t rows,
                int threads, Address adapted, Address inputs, int64_t inputs_stride) {
  if (layers.size() < attentions(blocks)) throw std::invalid_argument("fewer layers than blocks");
  if (const int64_t all = inputs_width(blocks); rows && all && (!inputs || inputs_stride < all))
    refuse("rows have ", inputs ? inputs_stride : 0, " inputs, the blocks take ", all);
  const LayerBuffers shared = {
      .x = at<bf16>(x),
      .cos_sin = at<float>(cos_sin),
      .rotary = rotary,
      .qkv = at<bf16>(qkv),
      .attended = at<bf16>(attended),
      .scratch = at<bf16>(scratch),
      .rows = rows,
      .threads = threads,
      .adapted = at<int64_t>(adapted),
      .inputs = {at<bf16>(inputs), inputs_stride},
  };
  if (!states) return run_layers(blocks, layers, nullptr, shared);
  const Recurrence recurrence = {*states, at<StateSegment>(segments), count};
  run_layers(blocks, layers, &recurrence, shared);
}

void make_ends(EmbeddingAndHead *self, Address embed, int64_t vocabulary, const Scale &norm, float eps, const Matrix &head,
               float embed_scale, float logit_scale, float logit_cap, const Matrix *packed, const InputsTable *inputs) {
  if (inputs && inputs->projection.inputs != head.inputs)
    refuse("inputs of layers are made of ", inputs->projection.inputs, " numbers, the head takes ", head.inputs);
  new (self) EmbeddingAndHead{at<bf16>(embed), vocabulary, norm, eps, head, embed_scale, logit_scale, logit_cap};
  if (packed) self->packed = *packed;
  if (inputs) self->inputs = *inputs;
}

void make_whole(ModelStep *self, const EmbeddingAndHead &ends, const Blocks &blocks, const AttentionStep &step,
                const Layers &layers, Address turns, int64_t turn_rows, int64_t rotary, Address adapted) {
  if (layers.size() != attentions(blocks)) throw std::invalid_argument("a model step needs as many layers as blocks");
  const int64_t made = ends.inputs ? ends.inputs->projection.outputs : 0, all = inputs_width(blocks);
  if (made != all) refuse("a row has ", made, " inputs, the blocks take ", all);
  new (self) ModelStep{ends, blocks, layers, step, at<float>(turns), turn_rows, rotary, at<int64_t>(adapted)};
}

typedef std::pair<std::vector<float>, std::vector<int64_t>> Found;

// The greatest logits and their places. states and segments: as in run_blocks.
Found run_whole(const ModelStep &self, const std::vector<int64_t> &tokens, Address scratch, Address logits, int threads,
                const RecurrentStates *states, Address segments, int64_t count) {
  const size_t rows = self.step.rows();
  if (tokens.size() != rows)
    throw std::invalid_argument(std::to_string(tokens.size()) + " tokens for " + std::to_string(rows) + " rows");
  Found found = {std::vector<float>(rows), std::vector<int64_t>(rows)};
  const auto run = [&](const Recurrence *recurrence) {
    self.run(tokens.data(), recurrence, at<bf16>(scratch), at<float>(logits), found.first.data(), found.second.data(), threads);
  };
  if (!states) {
    run(nullptr);
  } else {
    const Recurrence recurrence = {*states, at<StateSegment>(segments), count};
    run(&recurrence);
  }
  return found;
}

}  // namespace

void bind_model(nb::module_ &m) {
  nb::enum_<Order>(m, "Order")
      .value("pre", Order::pre)
      .value("post", Order::post)
      .value("parallel", Order::parallel)
      .value("sandwich", Order::sandwich)
      .value("after", Order::after);
  nb::class_<Scale>(m, "Scale").def("__init__", make_scale);
  nb::class_<Experts>(m, "Experts")
      .def("__init__", make_experts, "router"_a, "up"_a, "down"_a, named, "chosen"_a, "normalised"_a, "routing"_a,
           "correction"_a, "weighted_inputs"_a = false, "shared"_a = Matrices(), "outside"_a = 0, "scales"_a = 0);
  nb::class_<DeltaNet>(m, "DeltaNet")
      .def("__init__", make_net, "gates"_a, "vectors"_a, named, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a,
           "kernel"_a, "eps"_a);
  nb::class_<MambaNet>(m, "MambaNet")
      .def("__init__", make_mamba, "gates"_a, "vectors"_a, named, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a,
           "kernel"_a, "eps"_a);
  nb::class_<BesideMlp>(m, "BesideMlp")
      .def("__init__", make_beside_mlp, "router_norm"_a, "experts_norm"_a, "dense_out_norm"_a, "experts_out_norm"_a,
           "factor"_a);
  nb::class_<LayerInputs>(m, "LayerInputs").def("__init__", make_inputs, "gate"_a, "out"_a, "norm"_a);
  nb::class_<InputsTable>(m, "InputsTable")
      .def("__init__", make_inputs_table, named, "table"_a, "vocabulary"_a, "packed"_a.none(), "projection"_a, "norm"_a,
           "width"_a, "eps"_a, "table_scale"_a, "projected_scale"_a, "sum_scale"_a);
  nb::class_<Beside>(m, "Beside").def("__init__", make_beside, "mixed"_a, "out"_a, "times"_a);
  nb::class_<ShortConvolution>(m, "ShortConvolution")
      .def("__init__", make_convolution, "conv"_a, named, "channels"_a, "kernel"_a);
  nb::class_<Latent>(m, "Latent")
      .def("__init__", make_latent, "queries"_a, "keys"_a, "values"_a, named, "latent_norm"_a, "eps"_a,
           "query_in"_a = nb::none(), "query_norm"_a = 0);
  nb::class_<RecurrentStates>(m, "RecurrentStates").def("__init__", make_states, "layers"_a, "slots"_a);
  nb::class_<DecoderLayer>(m, "Block")
      .def("__init__", make_block, named, "order"_a, "activation"_a, "heads"_a, "kv_heads"_a, "dim"_a, "eps"_a, "qkv"_a,
           "out"_a, "up"_a.none(), "down"_a.none(), "attention_norm"_a, "mlp_norm"_a, "q_norm"_a, "k_norm"_a, "out_norms"_a,
           "turn_first"_a, "turned"_a, "residual_scale"_a, "out_eps"_a, "norm_whole"_a = false, "experts"_a = nb::none(),
           "gated"_a = false, "net"_a = nb::none(), "query_first"_a = -1, "turn_before_norm"_a = false, "latent"_a = nb::none(),
           "convolution"_a = nb::none(), "mamba"_a = nb::none(), "alphas"_a = 0, "beside"_a = nb::none(), "v_norm"_a = 0,
           "keys_as_values"_a = false, "beside_mlp"_a = nb::none(), "inputs"_a = nb::none(), "scale"_a = 1.0f)
      .def("scratch", &DecoderLayer::scratch)
      .def("mixed_size", &DecoderLayer::mixed_size)
      .def("mixed_at", &DecoderLayer::mixed_at)
      .def("gates_at", &DecoderLayer::gates_at)
      .def("attended_size", &DecoderLayer::attended_size)
      .def("recurred_at", &DecoderLayer::recurred_at)
      .def("before", before, unlocked, "x"_a, "cos_sin"_a, "qkv"_a, "scratch"_a, named, "rotary"_a, "rows"_a, "threads"_a,
           "adapted"_a = 0)
      .def("after", after, unlocked, "x"_a, "attended"_a, "scratch"_a, "rows"_a, "threads"_a, named, "gates"_a = 0,
           "gates_stride"_a = 0, "adapted"_a = 0, "inputs"_a = 0, "inputs_stride"_a = 0);
  nb::class_<AttentionStep>(m, "AttentionStep")
      .def("__init__", make_step, "type"_a, "positions"_a, "slots"_a, "offsets"_a, "bias"_a, named, "bias_len"_a, "rows"_a,
           "heads"_a, "kv_heads"_a, "dim"_a, "slot_count"_a, "scale"_a, "cap"_a, "threads"_a)
      .def("add_items", add_items)
      .def("go_on", go_on)
      .def("go_on_by_one", go_on_by_one);
  nb::class_<AttentionStep::Layer>(m, "StepLayer")
      .def("__init__", make_layer, "step"_a, "kind"_a, "k_pool"_a, "v_pool"_a, "sinks"_a, "stores"_a = true)
      .def("run", run, unlocked, "q"_a, "k"_a, "v"_a, "out"_a, named, "q_stride"_a, "k_stride"_a, "v_stride"_a);
  m.def("run_blocks", run_blocks, unlocked, "blocks"_a, "layers"_a, "x"_a, "qkv"_a, "attended"_a, "scratch"_a,
        "states"_a.none(), "segments"_a, "count"_a, named, "cos_sin"_a, "rotary"_a, "rows"_a, "threads"_a, "adapted"_a = 0,
        "inputs"_a = 0, "inputs_stride"_a = 0);
  nb::class_<EmbeddingAndHead>(m, "Ends").def("__init__", make_ends, "embed"_a, "vocabulary"_a, "norm"_a, "eps"_a, "head"_a,
                                              named, "embed_scale"_a, "logit_scale"_a, "logit_cap"_a, "packed"_a = nb::none(),
                                              "inputs"_a = nb::none());
  nb::class_<ModelStep>(m, "ModelStep")
      .def("__init__", make_whole, "ends"_a, "blocks"_a, "step"_a, "layers"_a, named, "turns"_a, "turn_rows"_a, "rotary"_a,
           "adapted"_a = 0)
      .def("scratch", &ModelStep::scratch)
      .def("run", run_whole, unlocked, "tokens"_a, "scratch"_a, "logits"_a, "threads"_a, "states"_a = nb::none(),
           "segments"_a = 0, "count"_a = 0);
}

}  // namespace headrace
