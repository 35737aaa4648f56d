// Attention of rows over chunks, folded in the canonical order: chunks left to right inside a block of 2,048 keys, then
// blocks left to right. Work is cut into units of (range of KV heads, range of rows); a unit walks all items that touch its
// rows, and for each its heads, which lie side by side in memory.
//
// R: rows, G: query heads per KV head, D: head size, P: D rounded up to 16; lane: one (row, query head of the group).
#include "arena.h"
#include "kernels.h"
#include "natural.h"
#include "paired.h"
#include "quantised.h"
#include "simd.h"
#include "states.h"
#include "tiled.h"

#include <new>

namespace headrace::HEADRACE_NS {

namespace {

#ifdef __AMX_BF16__
constexpr int64_t UNIT_LANES = 256;
#else
constexpr int64_t UNIT_LANES = 128;  // most lanes of a unit: their states stay in L2
#endif
constexpr int64_t SMALL_LANES = 16;  // fewer share a chunk too little

// The rows first..last-1 of one KV head.
template <typename Math> struct HeadRows {
  using T = typename Math::Type;
  const Attend &a;
  int64_t kv_head, first, last;  // rows first..last-1
  int64_t group, padded;
  typename Math::Query *q;       // [lanes, D]
  State block, total;
  int32_t *block_of;             // [rows]: index of the block that `block` holds, -1 at first
  typename Math::Space &space;   // shared by the heads of a unit
  int64_t all_seen;              // every row of the unit sees all keys before this position

  static int64_t floats(const Attend &a, int64_t rows) {
    const int64_t group = a.heads / a.kv_heads, padded = (a.dim + 15) / 16 * 16;
    return rows * group * (a.dim + 2 * padded + 4) + rows + 10 * 16;
  }

  HeadRows(const Attend &a, int64_t kv_head, int64_t first, int64_t last, typename Math::Space &space, float *memory)
      : a(a), kv_head(kv_head), first(first), last(last), group(a.heads / a.kv_heads), padded((a.dim + 15) / 16 * 16),
        space(space) {
    const int64_t lanes = (last - first) * group;
    auto cut = [&memory](int64_t n) { return memory += (n + 15) / 16 * 16, memory - (n + 15) / 16 * 16; };
    block.acc = cut(lanes * padded);
    total.acc = cut(lanes * padded);
    q = reinterpret_cast<typename Math::Query *>(cut(lanes * a.dim));
    block.m = cut(lanes);
    block.l = cut(lanes);
    total.m = cut(lanes);
    total.l = cut(lanes);
    block_of = reinterpret_cast<int32_t *>(cut(last - first));
  }

  void start() {
    all_seen = a.window > 0 ? 0 : a.positions[first] + 1;
    for (int64_t row = first; row < last; ++row)
      if (a.positions[row] + 1 < all_seen) all_seen = a.positions[row] + 1;
    for (int64_t row = first; row < last; ++row) {
      block_of[row - first] = -1;
      const T *from = static_cast<const T *>(a.q) + row * a.q_stride + kv_head * group * a.dim;
      Math::query(from, q + (row - first) * group * a.dim, group * a.dim);
    }
    for (int64_t lane = 0; lane < (last - first) * group; ++lane) {
      block.clear(lane, padded);
      total.clear(lane, padded);
    }
    if (a.from.block_of)
      for (int64_t row = first; row < last; ++row) {
        in_tensor(a.from.total, row).copy_to(here(total, row), group, a.dim);
        in_tensor(a.from.block, row).copy_to(here(block, row), group, a.dim);
        block_of[row - first] = a.from.block_of[row];
      }
  }

  Lanes here(const State &state, int64_t row) const { return {state, (row - first) * group, padded}; }
  Lanes in_tensor(const Parts &parts, int64_t row) const { return {parts, row * a.heads + kv_head * group, a.dim}; }

  // Keys of the chunk that a row may see: from..to-1 within the chunk; none if from >= to.
  void visible(int64_t row, int64_t key_start, int &from, int &to) const {
    const int64_t position = a.positions[row];
    const int64_t low = a.window > 0 ? position - a.window + 1 - key_start : 0;
    const int64_t high = position + 1 - key_start;
    from = static_cast<int>(low < 0 ? 0 : low > CHUNK ? CHUNK : low);
    to = static_cast<int>(high < 0 ? 0 : high > CHUNK ? CHUNK : high);
  }

  void enter_block(int64_t from, int64_t to, int32_t index) {
    int others = 0;  // most often none: a loop that vectorises
    for (int64_t row = from; row < to; ++row) others += block_of[row - first] != index;
    if (!others) return;
    for (int64_t row = from; row < to; ++row) {
      if (block_of[row - first] == index) continue;
      if (block_of[row - first] >= 0) close_block(row);
      block_of[row - first] = index;
    }
  }

  void close_block(int64_t row) {
    for (int64_t lane = (row - first) * group; lane < (row - first + 1) * group; ++lane) {
      total.template fold<Math>(lane, block, padded);
      block.clear(lane, padded);
    }
  }

  // `next` is where the keys lie that the unit reads after these (elements from here): they are fetched meanwhile.
  void walk(const Item &item, int64_t next) {
    const int64_t from = item.row_begin > first ? item.row_begin : first;
    const int64_t to = item.row_end < last ? item.row_end : last;
    enter_block(from, to, item.key_start / BLOCK);
    const Math math = Reader<Math>::open(a, static_cast<int64_t>(item.slot) * a.kv_heads + kv_head, padded, next,
                                         (to - from) * group, space);
    const int64_t begin = (from - first) * group, lanes = (to - from) * group;
    for (int64_t i = 0; i < lanes; i += LANES)
      walk_lanes(item, begin + i, static_cast<int>(lanes - i < LANES ? lanes - i : LANES), math, i);
  }

  // `n` lanes from `lane` on; `before` lanes have met the chunk already.
  void walk_lanes(const Item &item, int64_t lane, int n, const Math &math, int64_t before) {
    Seen seen;
    if (item.key_start + CHUNK <= all_seen) {
      seen.everything = true;
    } else {
      bool any = false;
      for (int r = 0; r < n; ++r) {
        visible(first + (lane + r) / group, item.key_start, seen.low[r], seen.high[r]);
        any |= seen.low[r] < seen.high[r];
      }
      if (!any) return;
    }
    alignas(64) float scores[LANES * CHUNK], bias[CHUNK], m[LANES], l[LANES];
    alignas(64) typename Math::Probability p[LANES * CHUNK];
    math.scores(n, q + lane * a.dim, scores, before);
    float scale = a.scale;
    if (a.bias) {
      for (int r = 0; r < n; ++r) add_bias(bias_of(item.key_start, lane + r, bias), scores + r * CHUNK);
      scale = 1.0f;
    }
    math.probabilities(n, scores, seen, scale, p, m, l);
    Weights weights;
    block.template take<Math>(lane, n, m, l, weights);
    math.values(n, p, seen, block.acc + lane * padded, weights, before);
  }

  void add_bias(const float *bias, float *scores) const {
    for (int j = 0; j < CHUNK; j += W) store(scores + j, madd(load(scores + j), splat(a.scale), load(bias + j)));
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
      if (a.to.block_of) {
        leave(row);
        continue;
      }
      close_block(row);
      T *out = static_cast<T *>(a.out) + (row * a.heads + kv_head * group) * a.dim;
      for (int64_t g = 0; g < group; ++g) total.write((row - first) * group + g, padded, a.dim, out + g * a.dim);
    }
  }

  // The row's state as it stands, for a call that folds on.
  void leave(int64_t row) const {
    if (a.to.total.acc) here(total, row).copy_to(in_tensor(a.to.total, row), group, a.dim);
    here(block, row).copy_to(in_tensor(a.to.block, row), group, a.dim);
    if (kv_head == 0) a.to.block_of[row] = block_of[row - first];  // the same for all heads: one thread writes it
  }
};

constexpr int MAX_HEADS = 32;  // most KV heads of a unit

template <typename Math> struct Unit {
  const Attend &a;
  int64_t first, last, head, heads;
  float *memory;
  int64_t block;  // of the fold, -1 for all

  static int64_t floats(const Attend &a, int64_t rows, int64_t heads) {
    return Math::scratch(a.dim) + 16 + heads * HeadRows<Math>::floats(a, rows);
  }

  bool touches(const Item &item) const {
    return item.row_begin < last && item.row_end > first && (block < 0 || item.key_start / BLOCK == block);
  }

  void run() {
    alignas(HeadRows<Math>) char places[MAX_HEADS * sizeof(HeadRows<Math>)];
    auto *each = reinterpret_cast<HeadRows<Math> *>(places);
    typename Math::Space space;
    space.scratch = memory;
    float *at = memory + (Math::scratch(a.dim) + 15) / 16 * 16;
    const int64_t step = HeadRows<Math>::floats(a, last - first) / 16 * 16;
    for (int64_t h = 0; h < heads; ++h, at += step) {
      new (each + h) HeadRows<Math>(a, head + h, first, last, space, at);
      each[h].start();
    }
    const Item *item = nullptr, *end = a.items + a.item_count;
    for (const Item *next = a.items; next < end; ++next) {
      if (!touches(*next)) continue;
      if (item) walk(each, *item, next);
      item = next;
    }
    if (item) walk(each, *item, nullptr);
    for (int64_t h = 0; h < heads; ++h) each[h].finish();
  }

  void walk(HeadRows<Math> *each, const Item &item, const Item *next) {
    const int64_t size = CHUNK * a.dim, slots = next ? static_cast<int64_t>(next->slot) - item.slot : 0;
    for (int64_t h = 0; h + 1 < heads; ++h) each[h].walk(item, size);
    each[heads - 1].walk(item, next ? (slots * a.kv_heads - (heads - 1)) * size : 0);
  }
};

// Whether most chunks are offered to one row only, so that rows have no reason to keep together.
bool nothing_shared(const Attend &a) {
  int64_t offered = 0;
  for (int64_t i = 0; i < a.item_count; ++i) offered += a.items[i].row_end - a.items[i].row_begin;
  return offered < 2 * a.item_count;
}

// How many rows and KV heads a unit has: few rows take many heads, whose chunks lie in one stretch of memory. And how many
// blocks of keys are folded apart: where there is but one range of rows they are what threads share best, since each then
// reads memory of its own; heads of one chunk lie side by side.
struct Cut {
  int64_t rows, heads, ranges, blocks;

  int64_t groups(const Attend &a) const { return a.kv_heads / heads; }
};

int64_t blocks_of(const Attend &a) {
  if (a.from.block_of || a.to.block_of || a.threads == 1) return 1;
  int64_t most = 0;
  for (int64_t i = 0; i < a.item_count; ++i) most = a.items[i].key_start > most ? a.items[i].key_start : most;
  return most / BLOCK + 1;
}

Cut cut(const Attend &a) {
  const int64_t group = a.heads / a.kv_heads, wanted = 4 * a.threads;
  int64_t rows = UNIT_LANES / group > 1 ? UNIT_LANES / group : 1;
  while (rows > 1 && rows * group > SMALL_LANES && a.kv_heads * ((a.rows + rows - 1) / rows) < wanted) rows /= 2;
  if (nothing_shared(a)) rows = 1;
  if (rows > a.rows) rows = a.rows;
  const int64_t ranges = (a.rows + rows - 1) / rows, blocks = ranges == 1 ? blocks_of(a) : 1;
  const int64_t enough = blocks > 1 ? wanted : a.threads;
  int64_t heads = 1;
  while (heads < MAX_HEADS && 2 * heads * rows * group <= UNIT_LANES && a.kv_heads % (2 * heads) == 0 &&
         ranges * blocks * (a.kv_heads / (2 * heads)) >= enough)
    heads *= 2;
  return {rows, heads, ranges, blocks};
}

template <typename Math> void attend_unit(const Attend &a, const Cut &size, int64_t index, int64_t block) {
  const int64_t groups = size.groups(a);
  const int64_t range = size.ranges - 1 - index / groups;  // later rows see more keys: start them first
  const int64_t first = range * size.rows, last = first + size.rows < a.rows ? first + size.rows : a.rows;
  float *memory = arena(Unit<Math>::floats(a, size.rows, size.heads));
  Unit<Math>{a, first, last, index % groups * size.heads, size.heads, memory, block}.run();
}

// The state of all rows and heads after each block alone: acc [R, Hq, D], m and l [R, Hq], block_of [R].
struct Blocks {
  const Attend &a;
  float *memory;

  static int64_t floats(const Attend &a) { return a.rows * (a.heads * (a.dim + 2) + 1); }

  Fold of(int64_t block) const {
    const int64_t lanes = a.rows * a.heads;
    float *acc = memory + block * floats(a), *m = acc + lanes * a.dim, *l = m + lanes;
    return {{}, {acc, m, l}, reinterpret_cast<int32_t *>(l + lanes)};
  }
};

// Blocks apart, each from nothing, then folded from left to right: the same bits.
template <typename Math> void attend_split(const Attend &a, const Cut &size) {
  static thread_local Arena states;
  const Blocks each{a, states.at_least(size.blocks * Blocks::floats(a))};
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads)
  for (int64_t i = 0; i < size.blocks * size.groups(a); ++i) {
    Attend part = a;
    part.to = each.of(i % size.blocks);
    attend_unit<Math>(part, size, i / size.blocks, i % size.blocks);
  }
#pragma omp parallel for schedule(static) num_threads(a.threads)
  for (int64_t lane = 0; lane < a.rows * a.heads; ++lane) {
    float m, l;
    State mine{{arena(a.dim), &m, &l}};
    mine.clear(0, a.dim);
    for (int64_t block = 0; block < size.blocks; ++block) {
      const Parts part = each.of(block).block;
      mine.fold<Math>(0, {{part.acc + lane * a.dim, part.m + lane, part.l + lane}}, a.dim);
    }
    mine.write(0, a.dim, a.dim, static_cast<typename Math::Type *>(a.out) + lane * a.dim);
  }
}

template <typename Math> void attend_by(const Attend &a) {
  const Cut size = cut(a);
  if (size.blocks > 1) return attend_split<Math>(a, size);
  const int64_t units = size.ranges * size.groups(a);
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads) if (units > 1)
  for (int64_t i = 0; i < units; ++i) attend_unit<Math>(a, size, i, -1);
}

template <typename Math> void attend_stored(const Attend &a) {
  a.k_scale ? attend_by<Quantised<Math>>(a) : attend_by<Math>(a);
}

}  // namespace

template <typename T> void attend(const Attend &a) {
  if (a.rows == 0) return;
#ifdef __AMX_BF16__
  if constexpr (sizeof(T) == 2)
    if (tiled(a.dim)) return attend_stored<Tiled>(a);
#endif
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == 2)
    if (paired(a.dim)) return attend_stored<Paired>(a);
#endif
  attend_stored<Natural<T>>(a);
}

template void attend<bf16>(const Attend &);
template void attend<float>(const Attend &);

}  // namespace headrace::HEADRACE_NS
