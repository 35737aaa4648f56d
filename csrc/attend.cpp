// Attention of rows over chunks, folded in the canonical order: chunks left to right inside a block of 2,048 keys, then
// blocks left to right. Work is cut into units of (KV head, range of rows); a unit walks all items that touch its rows.
//
// R: rows, G: query heads per KV head, D: head size, P: D rounded up to 16; lane: one (row, query head of the group).
#include "arena.h"
#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t UNIT_LANES = 128;   // most lanes of a unit: their states stay in L2
constexpr int64_t SMALL_LANES = 16;   // fewer share a converted chunk too little
constexpr int CONVERT_LANES = 8;      // from here on, converting a chunk to fp32 once pays

// Running softmax state of lanes: acc [lanes, P], m and l [lanes]. EMPTY is (0, -inf, 0).
struct State {
  float *acc, *m, *l;

  void clear(int64_t lane, int64_t padded) {
    for (int64_t d = 0; d < padded; ++d) acc[lane * padded + d] = 0.0f;
    m[lane] = -__builtin_inff();
    l[lane] = 0.0f;
  }

  // Folds a partial state (its m and l; acc follows by the weights) into this lane.
  Weights take(int64_t lane, float m_new, float l_new) {
    const float top = m[lane] > m_new ? m[lane] : m_new;
    vf x = {};
    x[0] = m[lane] - top;
    x[1] = m_new - top;
    const vf y = exp(x);
    l[lane] = l[lane] * y[0] + l_new * y[1];
    m[lane] = top;
    return {y[0], y[1]};
  }
};

template <typename T> struct Unit {
  const Attend &a;
  int64_t kv_head, first, last;  // rows first..last-1
  int64_t group, padded;
  float *q;                      // [lanes, D]
  State block, total;
  int32_t *block_of;             // [rows]: index of the block that `block` holds, -1 at first
  float *keys, *values_;         // a converted chunk: [D, 64], [64, P]

  static int64_t floats(const Attend &a, int64_t rows) {
    const int64_t group = a.heads / a.kv_heads, padded = (a.dim + 15) / 16 * 16;
    return rows * group * (a.dim + 2 * padded + 4) + rows + CHUNK * (a.dim + padded) + 10 * 16;
  }

  Unit(const Attend &a, int64_t kv_head, int64_t first, int64_t last, float *memory)
      : a(a), kv_head(kv_head), first(first), last(last), group(a.heads / a.kv_heads), padded((a.dim + 15) / 16 * 16) {
    const int64_t lanes = (last - first) * group;
    auto cut = [&memory](int64_t n) { return memory += (n + 15) / 16 * 16, memory - (n + 15) / 16 * 16; };
    keys = cut(CHUNK * a.dim);
    values_ = cut(CHUNK * padded);
    block.acc = cut(lanes * padded);
    total.acc = cut(lanes * padded);
    q = cut(lanes * a.dim);
    block.m = cut(lanes);
    block.l = cut(lanes);
    total.m = cut(lanes);
    total.l = cut(lanes);
    block_of = reinterpret_cast<int32_t *>(cut(last - first));
  }

  void start() {
    for (int64_t row = first; row < last; ++row) {
      block_of[row - first] = -1;
      const T *from = static_cast<const T *>(a.q) + row * a.q_stride + kv_head * group * a.dim;
      convert(from, q + (row - first) * group * a.dim, group * a.dim);
    }
    for (int64_t lane = 0; lane < (last - first) * group; ++lane) {
      block.clear(lane, padded);
      total.clear(lane, padded);
    }
  }

  static void convert(const T *from, float *to, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i));
    if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
  }

  // Keys of the chunk that a row may see: from..to-1 within the chunk; none if from >= to.
  void visible(int64_t row, int64_t key_start, int &from, int &to) const {
    const int64_t position = a.positions[row];
    const int64_t low = a.window > 0 ? position - a.window + 1 - key_start : 0;
    const int64_t high = position + 1 - key_start;
    from = static_cast<int>(low < 0 ? 0 : low > CHUNK ? CHUNK : low);
    to = static_cast<int>(high < 0 ? 0 : high > CHUNK ? CHUNK : high);
  }

  void enter_block(int64_t row, int32_t index) {
    if (block_of[row - first] == index) return;
    if (block_of[row - first] >= 0) close_block(row);
    block_of[row - first] = index;
  }

  void close_block(int64_t row) {
    for (int64_t lane = (row - first) * group; lane < (row - first + 1) * group; ++lane) {
      if (block.l[lane] == 0.0f) continue;
      const Weights w = total.take(lane, block.m[lane], block.l[lane]);
      for (int64_t d = 0; d < padded; d += W) {
        float *to = total.acc + lane * padded + d;
        store(to, madd(load(to), splat(w.keep), load(block.acc + lane * padded + d) * splat(w.take)));
      }
      block.clear(lane, padded);
    }
  }

  void walk(const Item &item) {
    const int64_t from = item.row_begin > first ? item.row_begin : first;
    const int64_t to = item.row_end < last ? item.row_end : last;
    if (from >= to) return;
    for (int64_t row = from; row < to; ++row) enter_block(row, item.key_start / BLOCK);
    const int64_t at = (item.slot * a.kv_heads + kv_head) * CHUNK * a.dim;
    const T *k = static_cast<const T *>(a.k) + at, *v = static_cast<const T *>(a.v) + at;
    const bool many = (to - from) * group >= CONVERT_LANES;
    if (a.dim != padded) {
      pad_values(v);
      if (many) convert(k, keys, CHUNK * a.dim);
      many ? tiles(item, from, to, keys, values_, padded) : tiles(item, from, to, k, values_, padded);
    } else if (many && sizeof(T) < sizeof(float)) {
      convert(k, keys, CHUNK * a.dim);
      convert(v, values_, CHUNK * a.dim);
      tiles(item, from, to, keys, values_, a.dim);
    } else {
      tiles(item, from, to, k, v, a.dim);
    }
  }

  void pad_values(const T *v) {
    for (int64_t j = 0; j < CHUNK; ++j) {
      for (int64_t d = a.dim; d < padded; ++d) values_[j * padded + d] = 0.0f;
      convert(v + j * a.dim, values_ + j * padded, a.dim);
    }
  }

  template <typename K, typename V>
  void tiles(const Item &item, int64_t from, int64_t to, const K *k, const V *v, int64_t stride) {
    const int64_t end = (to - first) * group;
    for (int64_t lane = (from - first) * group; lane < end; lane += LANES)
      tile(item, lane, static_cast<int>(end - lane < LANES ? end - lane : LANES), k, v, stride);
  }

  template <typename K, typename V>
  void tile(const Item &item, int64_t lane, int n, const K *k, const V *v, int64_t stride) {
    int low[LANES], high[LANES];
    bool any = false, all = true;
    for (int r = 0; r < n; ++r) {
      visible(first + (lane + r) / group, item.key_start, low[r], high[r]);
      any |= low[r] < high[r];
      all &= low[r] == 0 && high[r] == CHUNK;
    }
    if (!any) return;
    alignas(64) float p[LANES * CHUNK];
    scores(n, q + lane * a.dim, k, a.dim, p);
    Weights weights[LANES];
    for (int r = 0; r < n; ++r) {
      const bool touched = fold(item, lane + r, low[r], high[r], p + r * CHUNK, weights[r]);
      if (!touched) low[r] = high[r] = 0, all = false;
    }
    float *acc = block.acc + lane * padded;
    if (all) return values(n, p, 0, CHUNK, v, stride, acc, padded, weights);
    for (int r = 0; r < n; ++r)
      if (low[r] < high[r])
        values(1, p + r * CHUNK, low[r], high[r], v, stride, acc + r * padded, padded, weights + r);
  }

  // Scores of a lane -> probabilities and weights; false where the chunk leaves the lane untouched.
  bool fold(const Item &item, int64_t lane, int low, int high, float *p, Weights &weights) {
    if (low >= high) return false;
    alignas(64) float part[CHUNK];
    const float *bias = a.bias ? bias_of(item.key_start, lane, part) : nullptr;
    float m;
    const float l = probabilities(p, low, high, a.scale, bias, static_cast<const T *>(nullptr), m);
    if (l == 0.0f) return false;
    weights = block.take(lane, m, l);
    return true;
  }

  // Bias of the chunk's 64 keys; the table may end inside the chunk, behind the last visible key.
  const float *bias_of(int64_t key_start, int64_t lane, float *part) const {
    const float *from = a.bias + (kv_head * group + lane % group) * a.bias_len + key_start;
    const int64_t there = a.bias_len - key_start;
    if (there >= CHUNK) return from;
    for (int64_t j = 0; j < CHUNK; ++j) part[j] = j < there ? from[j] : 0.0f;
    return part;
  }

  void finish() {
    for (int64_t row = first; row < last; ++row) {
      close_block(row);
      T *out = static_cast<T *>(a.out) + (row * a.heads + kv_head * group) * a.dim;
      for (int64_t g = 0; g < group; ++g) write((row - first) * group + g, out + g * a.dim);
    }
  }

  void write(int64_t lane, T *out) {
    const float l = total.l[lane];
    for (int64_t d = 0; d < a.dim; d += W) {
      const vf y = l == 0.0f ? vf{} : load(total.acc + lane * padded + d) / splat(l);
      a.dim - d >= W ? store(out + d, y) : store_part(out + d, y, a.dim - d);
    }
  }
};

int64_t rows_per_unit(const Attend &a) {
  const int64_t group = a.heads / a.kv_heads, wanted = 4 * a.threads;
  int64_t rows = UNIT_LANES / group > 1 ? UNIT_LANES / group : 1;
  while (rows > 1 && rows * group > SMALL_LANES && a.kv_heads * ((a.rows + rows - 1) / rows) < wanted) rows /= 2;
  return rows < a.rows ? rows : a.rows;
}

}  // namespace

template <typename T> void attend(const Attend &a) {
  if (a.rows == 0) return;
  const int64_t rows = rows_per_unit(a), ranges = (a.rows + rows - 1) / rows;
  const int64_t units = ranges * a.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads) if (units > 1)
  for (int64_t i = 0; i < units; ++i) {
    const int64_t range = ranges - 1 - i / a.kv_heads;  // later rows see more keys: start them first
    const int64_t first = range * rows, last = first + rows < a.rows ? first + rows : a.rows;
    Unit<T> unit(a, i % a.kv_heads, first, last, arena(Unit<T>::floats(a, rows)));
    unit.start();
    for (int64_t n = 0; n < a.item_count; ++n) unit.walk(a.items[n]);
    unit.finish();
  }
}

template void attend<bf16>(const Attend &);
template void attend<float>(const Attend &);

}  // namespace headrace::HEADRACE_NS
