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
using namespace headrace;

namespace {

using Address = uint64_t;

using Addresses = std::vector<Address>;

template <typename T> T *at(Address address) { return reinterpret_cast<T *>(address); }

Partial parts_at(const Address *three) { return {at<float>(three[0]), at<float>(three[1]), at<float>(three[2])}; }

// acc, m and l of the total, the same of the block, and block_of; or nothing.
RunningState fold_at(const Addresses &state) {
  if (state.size() != 7) return {};
  return {parts_at(&state[0]), parts_at(&state[3]), at<int32_t>(state[6])};
}

void attend(int type, Address q, Address k, Address v, Address out, Address items, Address positions, Address bias,
            int64_t rows, int64_t q_stride, int64_t item_count, int64_t heads, int64_t kv_heads, int64_t dim, int64_t slots,
            int64_t window, int64_t bias_len, float scale, int threads, Address k_scale, Address v_scale, const Addresses &from,
            const Addresses &to) {
  const Attend a = {at<void>(q),
                    at<void>(k),
                    at<void>(v),
                    at<void>(out),
                    at<Item>(items),
                    at<int64_t>(positions),
                    at<float>(bias),
                    rows,
                    q_stride,
                    item_count,
                    heads,
                    kv_heads,
                    dim,
                    window,
                    bias_len,
                    scale,
                    threads,
                    at<float>(k_scale),
                    at<float>(v_scale),
                    fold_at(from),
                    fold_at(to)};
  check_items(a, slots);
  check_bias(a);
  kernels().attend[type](a);
}

void append(int type, Address k_new, Address v_new, Address k, Address v, Address slots, Address offsets, int64_t rows,
            int64_t k_stride, int64_t v_stride, int64_t kv_heads, int64_t dim, int64_t slot_count, int threads, Address k_scale,
            Address v_scale) {
  const Append a = {
      at<void>(k_new), at<void>(v_new), at<void>(k), at<void>(v), at<int32_t>(slots), at<int32_t>(offsets), rows, k_stride,
      v_stride,        kv_heads,        dim,         threads,     at<float>(k_scale), at<float>(v_scale)};
  check_places(a, slot_count);
  kernels().append[type](a);
}

void finish(int type, const Addresses &from, Address out, Address lse, int64_t lanes, int64_t dim, bool base2, int threads) {
  const RunningState state = fold_at(from);
  kernels().finish[type]({state.total, state.block, at<void>(out), at<float>(lse), lanes, dim, base2, threads});
}

void fold(const Addresses &both, int64_t lanes, int64_t dim, bool base2, int threads) {
  kernels().merge_partials({parts_at(&both.at(0)), parts_at(&both.at(3)), lanes, dim, base2, threads});
}

void merge(Address left_out, Address left_lse, Address right_out, Address right_lse, Address out, Address lse, int64_t lanes,
           int64_t dim, int threads) {
  kernels().merge_states({at<float>(left_out), at<float>(left_lse), at<float>(right_out), at<float>(right_lse), at<float>(out),
                          at<float>(lse), lanes, dim, threads});
}

void rms_norm(int type, Address x, Address weight, Address out, int64_t rows, int64_t width, float eps, int threads) {
  kernels().rms_norm[type]({at<void>(x), at<void>(weight), nullptr, at<void>(out), rows, width, 1, width, eps, threads});
}

void layer_norm(int type, Address x, Address weight, Address bias, Address out, int64_t rows, int64_t width, float eps,
                int threads) {
  kernels().layer_norm[type](
      {at<void>(x), at<void>(weight), at<void>(bias), at<void>(out), rows, width, 1, width, eps, threads});
}

void silu_mul(int type, Address x, Address out, int64_t rows, int64_t width, int threads) {
  kernels().silu_mul[type]({at<void>(x), at<void>(out), rows, width, threads});
}

void gelu(int type, bool tanh, Address x, Address out, int64_t elements, int threads) {
  const auto &op = tanh ? kernels().gelu_tanh : kernels().gelu;
  op[type]({at<void>(x), at<void>(out), 1, elements, threads});
}

void relu(int type, Address x, Address out, int64_t elements, int threads) {
  kernels().relu[type]({at<void>(x), at<void>(out), 1, elements, threads});
}

void rotary(int type, Address x, Address out, Address cos_sin, int64_t rows, int64_t x_stride, int64_t heads, int64_t dim,
            int64_t width, int threads) {
  kernels().rotary[type](
      {at<void>(x), at<void>(out), at<float>(cos_sin), rows, x_stride, heads * dim, heads, dim, width, threads});
}

void linear(int type, bool pairs, Address x, Address w, Address bias, Address out, int64_t rows, int64_t x_stride,
            int64_t inputs, int64_t outputs, bool gated, bool wide, int threads) {
  if (pairs) check_pairs(kernels());
  const auto op = pairs ? kernels().linear_pairs : kernels().linear_plain[type];
  op({at<void>(x),
      at<void>(w),
      at<void>(bias),
      at<void>(out),
      rows,
      x_stride,
      inputs,
      outputs,
      wide,
      threads,
      {nullptr, gated}});
}

void greatest(Address x, Address value, Address index, int64_t rows, int64_t width, int threads) {
  kernels().greatest({at<float>(x), at<float>(value), at<int64_t>(index), rows, width, threads, nullptr});
}

void make_matrix(Matrix *self, Form form, Address weight, Address scales, Address bias, int64_t inputs, int64_t outputs,
                 bool gated) {
  new (self) Matrix{form, at<void>(weight), at<void>(scales), at<bf16>(bias), inputs, outputs, gated};
}

void make_scale(Scale *self, bool rms, Address weight, Address bias) {
  new (self) Scale{rms, at<bf16>(weight), at<bf16>(bias)};
}

void make_block(DecoderLayer *self, Order order, Activation activation, int64_t heads, int64_t kv_heads, int64_t dim, float eps,
                const Matrix &qkv, const Matrix &out, const Matrix &up, const Matrix &down, const Scale &attention_norm,
                const Scale &mlp_norm, Address q_norm, Address k_norm) {
  new (self) DecoderLayer{order,    activation,       heads,           kv_heads, dim, eps, qkv, out, up, down, attention_norm,
                          mlp_norm, at<bf16>(q_norm), at<bf16>(k_norm)};
}

void before(const DecoderLayer &self, Address x, Address cos_sin, int64_t rotary, Address qkv, Address scratch, int64_t rows,
            int threads) {
  self.before(at<bf16>(x), at<float>(cos_sin), rotary, at<bf16>(qkv), at<bf16>(scratch), rows, threads);
}

void after(const DecoderLayer &self, Address x, Address attended, Address scratch, int64_t rows, int threads) {
  self.after(at<bf16>(x), at<bf16>(attended), at<bf16>(scratch), rows, threads);
}

void make_step(AttentionStep *self, int type, Address positions, Address slots, Address offsets, Address bias, int64_t bias_len,
               int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t slot_count, float scale, int threads) {
  Attend attend = {};
  attend.positions = at<int64_t>(positions);
  attend.bias = at<float>(bias);
  attend.bias_len = bias_len;
  attend.rows = rows;
  attend.heads = heads;
  attend.kv_heads = kv_heads;
  attend.dim = dim;
  attend.scale = scale;
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

void run(const AttentionStep &self, int64_t kind, Address q, int64_t q_stride, Address k, int64_t k_stride, Address v,
         int64_t v_stride, Address k_pool, Address v_pool, Address out) {
  self.run({kind, at<void>(k_pool), at<void>(v_pool)}, {at<void>(q), q_stride}, {at<void>(k), k_stride},
           {at<void>(v), v_stride}, at<void>(out));
}

typedef std::vector<const DecoderLayer *> Blocks;
typedef std::vector<int64_t> Kinds;
typedef std::vector<Address> Addresses;

std::vector<AttentionStep::Layer> layers_of(const Blocks &blocks, const Kinds &kinds, const Addresses &k, const Addresses &v) {
  std::vector<AttentionStep::Layer> layers;
  for (size_t i = 0; i < blocks.size(); ++i) layers.push_back({kinds.at(i), at<void>(k.at(i)), at<void>(v.at(i))});
  return layers;
}

// kinds, k_pools, v_pools: one for each block.
void run_blocks(const AttentionStep &self, const Blocks &blocks, const Kinds &kinds, const Addresses &k_pools,
                const Addresses &v_pools, Address x, Address cos_sin, int64_t rotary, Address qkv, Address attended,
                Address scratch, int64_t rows, int threads) {
  const std::vector<AttentionStep::Layer> layers = layers_of(blocks, kinds, k_pools, v_pools);
  run_layers(blocks.data(), layers.data(), layers.size(), self,
             {at<bf16>(x), at<float>(cos_sin), rotary, at<bf16>(qkv), at<bf16>(attended), at<bf16>(scratch), rows, threads});
}

void make_ends(EmbeddingAndHead *self, Address embed, int64_t vocabulary, const Scale &norm, float eps, const Matrix &head) {
  new (self) EmbeddingAndHead{at<bf16>(embed), vocabulary, norm, eps, head};
}

void make_whole(ModelStep *self, const EmbeddingAndHead &ends, const Blocks &blocks, const AttentionStep &step,
                const Kinds &kinds, const Addresses &k_pools, const Addresses &v_pools, Address turns, int64_t turn_rows,
                int64_t rotary) {
  new (self) ModelStep{ends, blocks, layers_of(blocks, kinds, k_pools, v_pools), step, at<float>(turns), turn_rows, rotary};
}

typedef std::pair<std::vector<float>, std::vector<int64_t>> Found;

// The greatest logits and their places.
Found run_whole(const ModelStep &self, const std::vector<int64_t> &tokens, Address scratch, Address logits, int threads) {
  const size_t rows = self.step.rows();
  if (tokens.size() != rows)
    throw std::invalid_argument(std::to_string(tokens.size()) + " tokens for " + std::to_string(rows) + " rows");
  Found found = {std::vector<float>(rows), std::vector<int64_t>(rows)};
  self.run(tokens.data(), at<bf16>(scratch), at<float>(logits), found.first.data(), found.second.data(), threads);
  return found;
}

void linear_quant(int type, int bits, Address x, Address codes, Address scales, Address bias, Address out, int64_t rows,
                  int64_t x_stride, int64_t inputs, int64_t outputs, bool gated, bool wide, int threads) {
  kernels().linear_quant[type]({at<void>(x),
                                at<void>(codes),
                                at<void>(scales),
                                at<void>(bias),
                                at<void>(out),
                                rows,
                                x_stride,
                                inputs,
                                outputs,
                                bits,
                                wide,
                                threads,
                                {nullptr, gated}});
}

// Stores where there is room for `fits`, else loads.
void move_chunks(Address fits, Address sections, int64_t stride, Address slots, int64_t count, Address k, Address v,
                 Address k_scale, Address v_scale, int64_t slot_count, int64_t heads, int64_t dim, int element, int format,
                 bool paired) {
  const Stored s = {at<void>(sections),
                    at<void>(k),
                    at<void>(v),
                    at<float>(k_scale),
                    at<float>(v_scale),
                    at<int32_t>(slots),
                    at<bool>(fits),
                    stride,
                    count,
                    heads,
                    dim,
                    static_cast<Element>(element),
                    static_cast<Format>(format),
                    paired};
  check_slots(s, slot_count);
  s.fits ? kernels().store_chunks(s) : kernels().load_chunks(s);
}

void probe_read(Address from, int64_t bytes, int threads) { kernels().probe_read(at<void>(from), bytes, threads); }

int64_t probe_multiply(int64_t rounds, int threads) { return kernels().probe_multiply(rounds, threads); }

void exp_many(Address x, Address out, int64_t n) { kernels().exp(at<float>(x), at<float>(out), n); }

}  // namespace

NB_MODULE(_cpu, m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def("attend", attend, unlocked);
  m.def("append", append, unlocked);
  m.def("finish", finish, unlocked);
  m.def("fold", fold, unlocked);
  m.def("merge", merge, unlocked);
  m.def("rms_norm", rms_norm, unlocked);
  m.def("layer_norm", layer_norm, unlocked);
  m.def("silu_mul", silu_mul, unlocked);
  m.def("gelu", gelu, unlocked);
  m.def("relu", relu, unlocked);
  m.def("rotary", rotary, unlocked);
  m.def("greatest", greatest, unlocked);
  m.def("linear", linear, unlocked);
  m.def("linear_quant", linear_quant, unlocked);
  nb::enum_<Order>(m, "Order").value("pre", Order::pre).value("post", Order::post).value("parallel", Order::parallel);
  nb::enum_<Activation>(m, "Activation")
      .value("silu_mul", Activation::silu_mul)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("relu", Activation::relu);
  nb::enum_<Form>(m, "Form")
      .value("plain", Form::plain)
      .value("pairs", Form::pairs)
      .value("int8", Form::int8)
      .value("int4", Form::int4);
  nb::class_<Matrix>(m, "Matrix").def("__init__", make_matrix);
  nb::class_<Scale>(m, "Scale").def("__init__", make_scale);
  nb::class_<DecoderLayer>(m, "Block")
      .def("__init__", make_block)
      .def("scratch", &DecoderLayer::scratch)
      .def("before", before, unlocked)
      .def("after", after, unlocked);
  nb::class_<AttentionStep>(m, "Step")
      .def("__init__", make_step)
      .def("add_items", add_items)
      .def("go_on", go_on)
      .def("go_on_by_one", go_on_by_one)
      .def("run", run, unlocked)
      .def("run_blocks", run_blocks, unlocked);
  nb::class_<EmbeddingAndHead>(m, "Ends").def("__init__", make_ends);
  nb::class_<ModelStep>(m, "Whole")
      .def("__init__", make_whole)
      .def("scratch", &ModelStep::scratch)
      .def("run", run_whole, unlocked);
  m.def("move_chunks", move_chunks, unlocked);
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
