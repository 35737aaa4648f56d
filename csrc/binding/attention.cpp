// Attention, states and chunks of the pool, and chunks stored.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "binding/binding.h"

namespace headrace {

namespace {

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

void index_scores(int type, const Pool &pool, Address q, Address weights, Address items, Address positions, Address out,
                  int64_t rows, int64_t count, int64_t heads, int64_t size, int64_t keys, int threads, int64_t pooled,
                  Address places) {
  if (pooled < 1 || CHUNK % pooled) throw std::invalid_argument("keys are pooled within chunks");
  const IndexScores a = {
      .q = at<void>(q),
      .weights = at<float>(weights),
      .v = pool.v,
      .v_scale = pool.v_scale,
      .items = at<Item>(items),
      .positions = at<int64_t>(positions),
      .out = at<float>(out),
      .rows = rows,
      .item_count = count,
      .heads = heads,
      .size = size,
      .dim = pool.dim,
      .keys = keys,
      .threads = threads,
      .pool = pooled,
      .places = at<float>(places),
  };
  check_items(Attend{.items = a.items, .rows = rows, .item_count = count}, pool.slots);
  kernels().index_scores[type](a);
}

void block_scores(int type, const Pool &pool, Address q, Address items, Address positions, Address out, int64_t rows,
                  int64_t count, int64_t size, int64_t chunks, int threads) {
  const BlockScores a = {
      .q = at<void>(q),
      .k = pool.k,
      .k_scale = pool.k_scale,
      .items = at<Item>(items),
      .positions = at<int64_t>(positions),
      .out = at<float>(out),
      .rows = rows,
      .item_count = count,
      .heads = pool.kv_heads,
      .size = size,
      .dim = pool.dim,
      .chunks = chunks,
      .threads = threads,
  };
  check_items(Attend{.items = a.items, .rows = rows, .item_count = count}, pool.slots);
  kernels().block_scores[type](a);
}

void gather(int type, const Pool &pool, const Pool &to, Address tables, Address chosen, int64_t rows, int64_t count,
            int64_t table, int64_t chunks, int threads) {
  const Gather g = {
      .v = pool.v,
      .v_scale = pool.v_scale,
      .to = to.v,
      .to_scale = to.v_scale,
      .tables = at<int32_t>(tables),
      .chosen = at<int32_t>(chosen),
      .rows = rows,
      .count = count,
      .table = table,
      .chunks = chunks,
      .dim = pool.dim,
      .first = pool.dim - to.dim,
      .threads = threads,
  };
  check_chosen(g, pool.slots);
  kernels().gather[type](g);
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

}  // namespace

void bind_attention(nb::module_ &m) {
  nb::class_<Pool>(m, "Pool").def("__init__", make_pool, "k"_a, "v"_a, "k_scale"_a, "v_scale"_a, named, "slots"_a, "kv_heads"_a,
                                  "dim"_a);
  nb::class_<Mask>(m, "Mask").def("__init__", make_mask, "items"_a, "positions"_a, "bias"_a, "sinks"_a, named, "count"_a,
                                  "window"_a, "bias_len"_a, "scale"_a, "cap"_a);
  m.def("attend", attend, unlocked, "type"_a, "q"_a, "pool"_a, "mask"_a, "out"_a, named, "rows"_a, "q_stride"_a, "heads"_a,
        "start"_a, "left"_a, "threads"_a);
  m.def("append", append, unlocked, "type"_a, "pool"_a, "k_new"_a, "v_new"_a, "slots"_a, "offsets"_a, named, "rows"_a,
        "k_stride"_a, "v_stride"_a, "threads"_a);
  m.def("index_scores", index_scores, unlocked, "type"_a, "pool"_a, "q"_a, "weights"_a, "items"_a, "positions"_a, "out"_a,
        named, "rows"_a, "count"_a, "heads"_a, "size"_a, "keys"_a, "threads"_a, "pooled"_a = 1, "places"_a = 0);
  m.def("block_scores", block_scores, unlocked, "type"_a, "pool"_a, "q"_a, "items"_a, "positions"_a, "out"_a, named, "rows"_a,
        "count"_a, "size"_a, "chunks"_a, "threads"_a);
  m.def("gather", gather, unlocked, "type"_a, "pool"_a, "to"_a, "tables"_a, "chosen"_a, named, "rows"_a, "count"_a, "table"_a,
        "chunks"_a, "threads"_a);
  m.def("finish", finish, unlocked, "type"_a, "state"_a, "out"_a, "lse"_a, "sinks"_a, named, "lanes"_a, "heads"_a, "dim"_a,
        "base2"_a, "threads"_a);
  m.def("merge_partials", merge_partials, unlocked, "total"_a, "block"_a, named, "lanes"_a, "dim"_a, "base2"_a, "threads"_a);
  m.def("merge_states", merge_states, unlocked, "left"_a, "right"_a, "merged"_a, named, "lanes"_a, "dim"_a, "threads"_a);
  nb::enum_<Element>(m, "Element").value("bf16", Element::bf16).value("fp32", Element::fp32).value("int8", Element::int8);
  nb::enum_<Format>(m, "Format").value("raw", Format::raw).value("int8", Format::int8).value("int4", Format::int4);
  m.def("move_chunks", move_chunks, unlocked, "fits"_a, "sections"_a, "slots"_a, "pool"_a, named, "stride"_a, "count"_a,
        "element"_a, "format"_a, "vnni"_a);
}

}  // namespace headrace
