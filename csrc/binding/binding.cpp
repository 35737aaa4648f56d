// Python binding: tensors come as addresses, because that costs a tenth of a DLPack exchange. headrace.kernels.cpu
// checks shapes, types and layouts before it calls; nothing here is public.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "common/checks.h"
#include "common/threads.h"
#include "isa/dispatch.h"
#include "model/model_step.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headrace;

namespace {

using Address = uint64_t;

using Addresses = std::vector<Address>;

template <typename T> T *at(Address address) { return reinterpret_cast<T *>(address); }

Partial parts_at(const Address *three) { return {at<float>(three[0]), at<float>(three[1]), at<float>(three[2])}; }

// acc, m and l of the total, the same of the block, and block_of; or nothing.
RunningState running_at(const Addresses &state) {
  if (state.size() != 7) return {};
  return {parts_at(&state[0]), parts_at(&state[3]), at<int32_t>(state[6])};
}

// One layer's pool, as kernels.records.Pool; no k: v holds activations.
struct Pool {
  void *k, *v;
  float *k_scale, *v_scale;
  int64_t slots, kv_heads, dim;
};

// As kernels.records.Mask. count: of the items.
struct Mask {
  const Item *items;
  const int64_t *positions;
  const float *bias, *sinks;
  int64_t count, window, bias_len;
  float scale, cap;
};

void make_pool(Pool *self, Address k, Address v, Address k_scale, Address v_scale, int64_t slots, int64_t kv_heads,
               int64_t dim) {
  new (self) Pool{at<void>(k), at<void>(v), at<float>(k_scale), at<float>(v_scale), slots, kv_heads, dim};
}

void make_mask(Mask *self, Address items, Address positions, Address bias, Address sinks, int64_t count, int64_t window,
               int64_t bias_len, float scale, float cap) {
  new (self)
      Mask{at<Item>(items), at<int64_t>(positions), at<float>(bias), at<float>(sinks), count, window, bias_len, scale, cap};
}

void attend(int type, Address q, const Pool &pool, const Mask &mask, Address out, int64_t rows, int64_t q_stride, int64_t heads,
            const Addresses &start, const Addresses &left, int threads) {
  const Attend a = {
      .q = at<void>(q),
      .k = pool.k,
      .v = pool.v,
      .out = at<void>(out),
      .items = mask.items,
      .positions = mask.positions,
      .bias = mask.bias,
      .rows = rows,
      .q_stride = q_stride,
      .item_count = mask.count,
      .heads = heads,
      .kv_heads = pool.kv_heads,
      .dim = pool.dim,
      .window = mask.window,
      .bias_len = mask.bias_len,
      .scale = mask.scale,
      .cap = mask.cap,
      .threads = threads,
      .k_scale = pool.k_scale,
      .v_scale = pool.v_scale,
      .from = running_at(start),
      .to = running_at(left),
      .sinks = mask.sinks,
  };
  check_items(a, pool.slots);
  check_bias(a);
  kernels().attend[type](a);
}

void append(int type, const Pool &pool, Address k_new, Address v_new, Address slots, Address offsets, int64_t rows,
            int64_t k_stride, int64_t v_stride, int threads) {
  const Append a = {
      .k_new = at<void>(k_new),
      .v_new = at<void>(v_new),
      .k = pool.k,
      .v = pool.v,
      .slots = at<int32_t>(slots),
      .offsets = at<int32_t>(offsets),
      .rows = rows,
      .k_stride = k_stride,
      .v_stride = v_stride,
      .kv_heads = pool.kv_heads,
      .dim = pool.dim,
      .threads = threads,
      .k_scale = pool.k_scale,
      .v_scale = pool.v_scale,
  };
  check_places(a, pool.slots);
  kernels().append[type](a);
}

void finish(int type, const Addresses &from, Address out, Address lse, Address sinks, int64_t lanes, int64_t heads, int64_t dim,
            bool base2, int threads) {
  const RunningState state = running_at(from);
  kernels().finish[type](
      {state.total, state.block, at<void>(out), at<float>(lse), lanes, dim, base2, threads, at<float>(sinks), heads});
}

void merge_partials(const Addresses &total, const Addresses &block, int64_t lanes, int64_t dim, bool base2, int threads) {
  kernels().merge_partials({parts_at(total.data()), parts_at(block.data()), lanes, dim, base2, threads});
}

using State = std::pair<Address, Address>;  // out and lse

void merge_states(State left, State right, State merged, int64_t lanes, int64_t dim, int threads) {
  kernels().merge_states({at<float>(left.first), at<float>(left.second), at<float>(right.first), at<float>(right.second),
                          at<float>(merged.first), at<float>(merged.second), lanes, dim, threads});
}

void rms_norm(int type, Address x, Address weight, Address out, int64_t rows, int64_t width, float eps, float offset,
              int threads) {
  kernels().rms_norm[type](
      {at<void>(x), at<void>(weight), nullptr, at<void>(out), rows, width, 1, width, eps, threads, offset});
}

// vectors: conv, rate, dt_bias and norm. states: last and matrices, of so many slots.
void gated_delta(int type, Address mixed, Address gates, const Addresses &vectors, const Addresses &states, Address segments,
                 Address out, int64_t rows, int64_t mixed_stride, int64_t count, int64_t slots, int64_t key_heads,
                 int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t kernel, float eps, int threads) {
  const GatedDelta a = {
      .mixed = at<void>(mixed),
      .gates = at<float>(gates),
      .conv = at<float>(vectors.at(0)),
      .rate = at<float>(vectors.at(1)),
      .dt_bias = at<float>(vectors.at(2)),
      .norm = at<float>(vectors.at(3)),
      .last = at<void>(states.at(0)),
      .matrices = at<float>(states.at(1)),
      .segments = at<DeltaSegment>(segments),
      .out = at<void>(out),
      .rows = rows,
      .mixed_stride = mixed_stride,
      .segment_count = count,
      .key_heads = key_heads,
      .value_heads = value_heads,
      .key_dim = key_dim,
      .value_dim = value_dim,
      .kernel = kernel,
      .eps = eps,
      .threads = threads,
  };
  check_segments(a, slots);
  kernels().gated_delta[type](a);
}

void layer_norm(int type, Address x, Address weight, Address bias, Address out, int64_t rows, int64_t width, float eps,
                int threads) {
  kernels().layer_norm[type](
      {at<void>(x), at<void>(weight), at<void>(bias), at<void>(out), rows, width, 1, width, eps, threads});
}

template <auto operation> void activate(int type, Address x, Address out, int64_t rows, int64_t width, int threads) {
  (kernels().*operation)[type]({at<void>(x), at<void>(out), rows, width, threads});
}

void rotary(int type, Address x, Address cos_sin, Address out, int64_t rows, int64_t x_stride, int64_t heads, int64_t dim,
            int64_t width, int64_t turn_stride, int threads) {
  kernels().rotary[type](
      {at<void>(x), at<void>(out), at<float>(cos_sin), rows, x_stride, heads * dim, heads, dim, width, turn_stride, threads});
}

void soft_cap(Address x, int64_t n, float scale, float cap, int threads) {
  kernels().soft_cap(at<float>(x), n, scale, cap, threads);
}

void greatest(Address x, Address value, Address index, int64_t rows, int64_t width, int threads) {
  kernels().greatest({at<float>(x), at<float>(value), at<int64_t>(index), rows, width, threads, nullptr});
}

void softmax_sums(Address x, Address target, Address greatest, Address sum, Address above, int64_t rows, int64_t width,
                  int threads) {
  kernels().softmax_sums(
      {at<float>(x), at<int64_t>(target), at<float>(greatest), at<double>(sum), at<int64_t>(above), rows, width, threads});
}

void make_scaling(Scaling *self, Number number, Offset offset, bool subs, int64_t block, int64_t group, int64_t run) {
  if (block && (group < 1 || block % group || run < 16 || run > 64 || run & (run - 1) || group % run))
    throw std::invalid_argument("a group must divide its block, and a run, of 16, 32 or 64 inputs, its group");
  new (self) Scaling{number, offset, subs, block, group, run};
}

void make_matrix(Matrix *self, Form form, Address weight, Address scales, Address bias, int64_t inputs, int64_t outputs,
                 bool gated, const Scaling &scaling, Address order) {
  if (scaling.block && inputs % scaling.block) throw std::invalid_argument("inputs must be a multiple of a scale's block");
  new (self)
      Matrix{form, at<void>(weight), at<void>(scales), at<bf16>(bias), inputs, outputs, gated, scaling, at<int32_t>(order)};
}

Matrix matrix_of_parts(const std::vector<Matrix> &parts, Address bias, int64_t inputs, int64_t outputs) {
  int64_t sum = 0;
  for (const Matrix &part : parts) sum += part.inputs == inputs && !part.gated ? part.outputs : outputs + 1;
  if (sum != outputs || parts.empty()) throw std::invalid_argument("the parts do not make up the matrix");
  Matrix whole = {Form::plain, nullptr, nullptr, at<bf16>(bias), inputs, outputs, false};
  whole.parts = parts;
  return whole;
}

// The matrix's bias is of the type of x, whatever its own says.
void linear(int type, Address x, const Matrix &m, Address out, int64_t rows, int64_t x_stride, bool wide, Gate gate,
            int threads) {
  const Epilogue epilogue = {.gated = m.gated, .gate = gate};
  multiply(kernels(), m, {type, at<void>(x), rows, x_stride, at<void>(out), wide, threads, epilogue});
}

typedef std::vector<Matrix> Matrices;

// Rows begin[e] .. begin[e + 1] - 1 by matrix e.
void linear_groups(int type, Address x, const Matrices &matrices, const std::vector<int64_t> &begin, Address out, int64_t rows,
                   int64_t x_stride, Gate gate, int threads) {
  if (matrices.empty() || begin.size() != matrices.size() + 1 || begin.front() != 0 || begin.back() != rows)
    refuse("rows of groups must begin at 0 and end at ", rows);
  for (size_t e = 0; e < matrices.size(); ++e)
    if (begin[e + 1] < begin[e]) refuse("group ", static_cast<int64_t>(e), " ends before it begins");
  check_shapes(matrices);
  const Epilogue epilogue = {.gated = matrices.front().gated, .gate = gate};
  multiply_groups(kernels(), matrices, begin, {type, at<void>(x), rows, x_stride, at<void>(out), false, threads, epilogue});
}

void route(Address x, Address expert, Address share, int64_t rows, int64_t experts, int64_t chosen, bool normalised,
           int threads) {
  kernels().route({at<float>(x), at<int32_t>(expert), at<float>(share), rows, experts, chosen, normalised, threads});
}

void combine(int type, Address y, Address place, Address share, Address out, int64_t rows, int64_t chosen, int64_t width,
             int threads) {
  for (int64_t i = 0; i < rows * chosen; ++i)
    if (const int32_t found = at<int32_t>(place)[i]; found < 0 || found >= rows * chosen)
      refuse("place[", i, "] is ", static_cast<int64_t>(found), ", of ", rows * chosen, " rows");
  kernels().combine[type](
      {at<void>(y), at<int32_t>(place), at<float>(share), nullptr, at<void>(out), rows, chosen, width, threads});
}

void make_scale(Scale *self, bool rms, Address weight, Address bias, float offset) {
  new (self) Scale{rms, at<bf16>(weight), at<bf16>(bias), offset};
}

// shared: gate, up and down of the expert that all rows meet; or none.
void make_experts(Experts *self, const Matrix &router, const Matrices &up, const Matrices &down, int64_t chosen,
                  bool normalised, const Matrices &shared, Address outside) {
  const int64_t count = router.outputs;
  if (static_cast<int64_t>(up.size()) != count || up.size() != down.size() || chosen < 1 || chosen > count)
    refuse("a router of ", count, " experts of which ", chosen, " are chosen does not fit ", static_cast<int64_t>(up.size()),
           " and ", static_cast<int64_t>(down.size()), " matrices");
  check_shapes(up);
  check_shapes(down);
  if (!shared.empty() && shared.size() != 3) refuse("a shared expert has a gate, up and down");
  new (self) Experts{router, up, down, chosen, normalised, shared, at<OutsideExpert>(outside)};
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

// layers: where `last` and `matrices` of each lie.
void make_states(RecurrentStates *self, const std::vector<std::pair<Address, Address>> &layers, int64_t slots) {
  RecurrentStates states = {{}, slots};
  for (const auto &[last, matrices] : layers) states.layers.push_back({at<void>(last), at<float>(matrices)});
  new (self) RecurrentStates(states);
}

// out_norms: those of Order::sandwich, of attention and of the MLP; otherwise none.
void make_block(DecoderLayer *self, Order order, Activation activation, int64_t heads, int64_t kv_heads, int64_t dim, float eps,
                const Matrix &qkv, const Matrix &out, const Matrix &up, const Matrix &down, const Scale &attention_norm,
                const Scale &mlp_norm, Address q_norm, Address k_norm, const std::vector<Scale> &out_norms, int64_t turn_first,
                int64_t turned, float residual_scale, bool norm_whole, const Experts *experts, bool gated,
                const DeltaNet *net) {
  if (out_norms.size() != (order == Order::sandwich ? 2 : 0)) refuse("a block of this order has other norms");
  if (experts && (order == Order::sandwich || residual_scale != 1.0f)) refuse("experts add to the residual as it is");
  new (self) DecoderLayer{
      .order = order,
      .activation = activation,
      .heads = heads,
      .kv_heads = kv_heads,
      .dim = dim,
      .eps = eps,
      .qkv = qkv,
      .out = out,
      .up = up,
      .down = down,
      .experts = experts ? *experts : Experts{},
      .attention_norm = attention_norm,
      .mlp_norm = mlp_norm,
      .attention_out_norm = out_norms.empty() ? Scale{} : out_norms[0],
      .mlp_out_norm = out_norms.empty() ? Scale{} : out_norms[1],
      .q_norm = at<bf16>(q_norm),
      .k_norm = at<bf16>(k_norm),
      .norm_whole = norm_whole,
      .turn_first = turn_first,
      .turned = turned,
      .residual_scale = residual_scale,
      .gated = gated,
      .net = net ? std::optional<DeltaNet>(*net) : std::nullopt,
  };
}

void before(const DecoderLayer &self, Address x, Address cos_sin, Address qkv, Address scratch, int64_t rotary, int64_t rows,
            int threads) {
  self.before(at<bf16>(x), at<float>(cos_sin), rotary, at<bf16>(qkv), at<bf16>(scratch), rows, threads);
}

void after(const DecoderLayer &self, Address x, Address attended, Address scratch, int64_t rows, int threads, Address gates,
           int64_t gates_stride) {
  self.after(at<bf16>(x), at<bf16>(attended), at<bf16>(scratch), rows, threads, {at<bf16>(gates), gates_stride});
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

void make_layer(AttentionStep::Layer *self, int64_t kind, Address k_pool, Address v_pool, Address sinks) {
  new (self) AttentionStep::Layer{kind, at<void>(k_pool), at<void>(v_pool), at<float>(sinks)};
}

void run(const AttentionStep &self, const AttentionStep::Layer &layer, Address q, Address k, Address v, Address out,
         int64_t q_stride, int64_t k_stride, int64_t v_stride) {
  self.run(layer, {at<void>(q), q_stride}, {at<void>(k), k_stride}, {at<void>(v), v_stride}, at<void>(out));
}

typedef std::vector<AttentionStep::Layer> Layers;

size_t attentions(const Blocks &blocks) {
  size_t count = 0;
  for (const DecoderLayer *block : blocks) count += !block->net;
  return count;
}

// layers: one for each block with attention, or more. states, and segments of which there are `count`: of the recurrent ones.
void run_blocks(const AttentionStep &self, const Blocks &blocks, const Layers &layers, Address x, Address qkv, Address attended,
                Address scratch, const RecurrentStates *states, Address segments, int64_t count, Address cos_sin,
                int64_t rotary, int64_t rows, int threads) {
  if (layers.size() < attentions(blocks)) throw std::invalid_argument("fewer layers than blocks");
  const LayerBuffers shared = {
      .x = at<bf16>(x),
      .cos_sin = at<float>(cos_sin),
      .rotary = rotary,
      .qkv = at<bf16>(qkv),
      .attended = at<bf16>(attended),
      .scratch = at<bf16>(scratch),
      .rows = rows,
      .threads = threads,
  };
  if (!states) return run_layers(blocks, layers, self, nullptr, shared);
  const Recurrence recurrence = {*states, at<DeltaSegment>(segments), count};
  run_layers(blocks, layers, self, &recurrence, shared);
}

void make_ends(EmbeddingAndHead *self, Address embed, int64_t vocabulary, const Scale &norm, float eps, const Matrix &head,
               float embed_scale, float logit_scale, float logit_cap) {
  new (self) EmbeddingAndHead{at<bf16>(embed), vocabulary, norm, eps, head, embed_scale, logit_scale, logit_cap};
}

void make_whole(ModelStep *self, const EmbeddingAndHead &ends, const Blocks &blocks, const AttentionStep &step,
                const Layers &layers, Address turns, int64_t turn_rows, int64_t rotary) {
  if (layers.size() != attentions(blocks)) throw std::invalid_argument("a model step needs as many layers as blocks");
  new (self) ModelStep{ends, blocks, layers, step, at<float>(turns), turn_rows, rotary};
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
    const Recurrence recurrence = {*states, at<DeltaSegment>(segments), count};
    run(&recurrence);
  }
  return found;
}

// Stores where there is room for `fits`, else loads.
void move_chunks(Address fits, Address sections, Address slots, const Pool &pool, int64_t stride, int64_t count,
                 Element element, Format format, bool vnni) {
  const Stored s = {
      .sections = at<void>(sections),
      .k = pool.k,
      .v = pool.v,
      .k_scale = pool.k_scale,
      .v_scale = pool.v_scale,
      .slots = at<int32_t>(slots),
      .fits = at<bool>(fits),
      .stride = stride,
      .count = count,
      .heads = pool.kv_heads,
      .dim = pool.dim,
      .element = element,
      .format = format,
      .vnni = vnni,
  };
  check_slots(s, pool.slots);
  s.fits ? kernels().store_chunks(s) : kernels().load_chunks(s);
}

void probe_read(Address from, int64_t bytes, int threads) { kernels().probe_read(at<void>(from), bytes, threads); }

int64_t probe_multiply(int64_t rounds, int threads) { return kernels().probe_multiply(rounds, threads); }

void exp_many(Address x, Address out, int64_t n) { kernels().exp(at<float>(x), at<float>(out), n); }

}  // namespace

// Functions whose arguments are all tensors and few numbers take them by place; whatever else there is goes by name.
NB_MODULE(_cpu, m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  const auto named = nb::kw_only();
  nb::class_<Pool>(m, "Pool").def("__init__", make_pool, "k"_a, "v"_a, "k_scale"_a, "v_scale"_a, named, "slots"_a, "kv_heads"_a,
                                  "dim"_a);
  nb::class_<Mask>(m, "Mask").def("__init__", make_mask, "items"_a, "positions"_a, "bias"_a, "sinks"_a, named, "count"_a,
                                  "window"_a, "bias_len"_a, "scale"_a, "cap"_a);
  m.def("attend", attend, unlocked, "type"_a, "q"_a, "pool"_a, "mask"_a, "out"_a, named, "rows"_a, "q_stride"_a, "heads"_a,
        "start"_a, "left"_a, "threads"_a);
  m.def("append", append, unlocked, "type"_a, "pool"_a, "k_new"_a, "v_new"_a, "slots"_a, "offsets"_a, named, "rows"_a,
        "k_stride"_a, "v_stride"_a, "threads"_a);
  m.def("finish", finish, unlocked, "type"_a, "state"_a, "out"_a, "lse"_a, "sinks"_a, named, "lanes"_a, "heads"_a, "dim"_a,
        "base2"_a, "threads"_a);
  m.def("merge_partials", merge_partials, unlocked, "total"_a, "block"_a, named, "lanes"_a, "dim"_a, "base2"_a, "threads"_a);
  m.def("merge_states", merge_states, unlocked, "left"_a, "right"_a, "merged"_a, named, "lanes"_a, "dim"_a, "threads"_a);
  m.def("rms_norm", rms_norm, unlocked, "type"_a, "x"_a, "weight"_a, "out"_a, named, "rows"_a, "width"_a, "eps"_a, "offset"_a,
        "threads"_a);
  m.def("gated_delta", gated_delta, unlocked, "type"_a, "mixed"_a, "gates"_a, "vectors"_a, "states"_a, "segments"_a, "out"_a,
        named, "rows"_a, "mixed_stride"_a, "count"_a, "slots"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a,
        "kernel"_a, "eps"_a, "threads"_a);
  m.def("layer_norm", layer_norm, unlocked, "type"_a, "x"_a, "weight"_a, "bias"_a, "out"_a, named, "rows"_a, "width"_a, "eps"_a,
        "threads"_a);
  m.def("rotary", rotary, unlocked, "type"_a, "x"_a, "cos_sin"_a, "out"_a, named, "rows"_a, "x_stride"_a, "heads"_a, "dim"_a,
        "width"_a, "turn_stride"_a, "threads"_a);
  m.def("soft_cap", soft_cap, unlocked);
  m.def("greatest", greatest, unlocked);
  m.def("softmax_sums", softmax_sums, unlocked);
  m.def("linear", linear, unlocked, "type"_a, "x"_a, "matrix"_a, "out"_a, named, "rows"_a, "x_stride"_a, "wide"_a, "gate"_a,
        "threads"_a);
  m.def("linear_groups", linear_groups, unlocked, "type"_a, "x"_a, "matrices"_a, "begin"_a, "out"_a, named, "rows"_a,
        "x_stride"_a, "gate"_a, "threads"_a);
  m.def("route", route, unlocked, "x"_a, "expert"_a, "share"_a, named, "rows"_a, "experts"_a, "chosen"_a, "normalised"_a,
        "threads"_a);
  m.def("combine", combine, unlocked, "type"_a, "y"_a, "place"_a, "share"_a, "out"_a, named, "rows"_a, "chosen"_a, "width"_a,
        "threads"_a);
  nb::enum_<Gate>(m, "Gate")
      .value("silu", Gate::silu)
      .value("gelu_tanh", Gate::gelu_tanh)
      .value("swiglu_oai", Gate::swiglu_oai);
  nb::enum_<Order>(m, "Order")
      .value("pre", Order::pre)
      .value("post", Order::post)
      .value("parallel", Order::parallel)
      .value("sandwich", Order::sandwich);
  nb::enum_<Activation> activations(m, "Activation");
#define HEADRACE_DEFINE(name)                        \
  activations.value(#name, Activation::name);        \
  m.def(#name, activate<&Kernels::name>, unlocked);
  HEADRACE_ACTIVATIONS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
  nb::enum_<Form> forms(m, "Form");
#define HEADRACE_DEFINE(name) forms.value(#name, Form::name);
  HEADRACE_FORMS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
  nb::enum_<Element>(m, "Element").value("bf16", Element::bf16).value("fp32", Element::fp32).value("int8", Element::int8);
  nb::enum_<Format>(m, "Format").value("raw", Format::raw).value("int8", Format::int8).value("int4", Format::int4);
  nb::enum_<Number> numbers(m, "Number");
#define HEADRACE_DEFINE(name) numbers.value(#name, Number::name);
  HEADRACE_NUMBERS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
  nb::enum_<Offset> offsets(m, "Offset");
#define HEADRACE_DEFINE(name) offsets.value(#name, Offset::name);
  HEADRACE_OFFSETS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
  nb::class_<Scaling>(m, "Scaling")
      .def("__init__", make_scaling, "number"_a, "offset"_a, named, "subs"_a, "block"_a, "group"_a, "run"_a);
  nb::class_<Matrix>(m, "Matrix")
      .def("__init__", make_matrix, "form"_a, "weight"_a, "scales"_a, "bias"_a, named, "inputs"_a, "outputs"_a, "gated"_a,
           "scaling"_a, "order"_a)
      .def_static("of_parts", matrix_of_parts, "parts"_a, "bias"_a, named, "inputs"_a, "outputs"_a);
  nb::class_<Scale>(m, "Scale").def("__init__", make_scale);
  nb::class_<Experts>(m, "Experts")
      .def("__init__", make_experts, "router"_a, "up"_a, "down"_a, named, "chosen"_a, "normalised"_a, "shared"_a = Matrices(),
           "outside"_a = 0);
  nb::class_<DeltaNet>(m, "DeltaNet")
      .def("__init__", make_net, "gates"_a, "vectors"_a, named, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a,
           "kernel"_a, "eps"_a);
  nb::class_<RecurrentStates>(m, "RecurrentStates").def("__init__", make_states, "layers"_a, "slots"_a);
  nb::class_<DecoderLayer>(m, "Block")
      .def("__init__", make_block, named, "order"_a, "activation"_a, "heads"_a, "kv_heads"_a, "dim"_a, "eps"_a, "qkv"_a,
           "out"_a, "up"_a, "down"_a, "attention_norm"_a, "mlp_norm"_a, "q_norm"_a, "k_norm"_a, "out_norms"_a, "turn_first"_a,
           "turned"_a, "residual_scale"_a, "norm_whole"_a = false, "experts"_a = nb::none(), "gated"_a = false,
           "net"_a = nb::none())
      .def("scratch", &DecoderLayer::scratch)
      .def("mixed_size", &DecoderLayer::mixed_size)
      .def("gates_at", &DecoderLayer::gates_at)
      .def("before", before, unlocked, "x"_a, "cos_sin"_a, "qkv"_a, "scratch"_a, named, "rotary"_a, "rows"_a, "threads"_a)
      .def("after", after, unlocked, "x"_a, "attended"_a, "scratch"_a, "rows"_a, "threads"_a, named, "gates"_a = 0,
           "gates_stride"_a = 0);
  nb::class_<AttentionStep::Layer>(m, "StepLayer").def("__init__", make_layer);
  nb::class_<AttentionStep>(m, "AttentionStep")
      .def("__init__", make_step, "type"_a, "positions"_a, "slots"_a, "offsets"_a, "bias"_a, named, "bias_len"_a, "rows"_a,
           "heads"_a, "kv_heads"_a, "dim"_a, "slot_count"_a, "scale"_a, "cap"_a, "threads"_a)
      .def("add_items", add_items)
      .def("go_on", go_on)
      .def("go_on_by_one", go_on_by_one)
      .def("run", run, unlocked, "layer"_a, "q"_a, "k"_a, "v"_a, "out"_a, named, "q_stride"_a, "k_stride"_a, "v_stride"_a)
      .def("run_blocks", run_blocks, unlocked, "blocks"_a, "layers"_a, "x"_a, "qkv"_a, "attended"_a, "scratch"_a,
           "states"_a.none(), "segments"_a, "count"_a, named, "cos_sin"_a, "rotary"_a, "rows"_a, "threads"_a);
  nb::class_<EmbeddingAndHead>(m, "Ends").def("__init__", make_ends, "embed"_a, "vocabulary"_a, "norm"_a, "eps"_a, "head"_a,
                                              named, "embed_scale"_a, "logit_scale"_a, "logit_cap"_a);
  nb::class_<ModelStep>(m, "ModelStep")
      .def("__init__", make_whole, "ends"_a, "blocks"_a, "step"_a, "layers"_a, named, "turns"_a, "turn_rows"_a, "rotary"_a)
      .def("scratch", &ModelStep::scratch)
      .def("run", run_whole, unlocked, "tokens"_a, "scratch"_a, "logits"_a, "threads"_a, "states"_a = nb::none(),
           "segments"_a = 0, "count"_a = 0);
  m.def("move_chunks", move_chunks, unlocked, "fits"_a, "sections"_a, "slots"_a, "pool"_a, named, "stride"_a, "count"_a,
        "element"_a, "format"_a, "vnni"_a);
  m.def("exp", exp_many, unlocked);
  m.def("probe_read", probe_read, unlocked);
  m.def("probe_multiply", probe_multiply, unlocked);
  m.def("probe_handover", hand_over, unlocked);
  m.def("available_isas", available_isas);
  m.def("built_isas", built_isas);
  m.def("isa", isa);
  m.def("use_isa", use_isa);
  m.def("use_l1", use_l1);
}
