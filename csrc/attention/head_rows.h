// Some rows of one KV head, which meet chunks in the canonical order: their queries, their states, and how they walk.
//
// R: rows, G: query heads per KV head, D: head size; lane: one (row, query head of the group).
#pragma once

#include <new>

#include "attention/amx.h"
#include "attention/plain.h"
#include "attention/quantised.h"
#include "attention/states.h"
#include "attention/vnni.h"
#include "common/arena.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

// Query heads that meet the same KV head: all of its group, or a part of them.
struct QueryHeads {
  int64_t kv_head, first, count;
};

// The rows first..last-1 of some query heads of one KV head.
template <Policy Math> struct HeadRows {
  using T = typename Math::Type;
  const Attend &a;
  int64_t kv_head, query, group;  // query heads query..query+group-1
  int64_t first, last, padded;    // rows first..last-1
  typename Math::Query *q;        // [lanes, D]
  State block, total;
  int32_t *block_of;            // [rows]: index of the block that `block` holds, -1 at first
  typename Math::Space &space;  // shared by the heads of a unit
  int64_t all_seen;             // every row of the unit sees all keys before this position

  // Bytes that `rows` rows of so many query heads take.
  static int64_t bytes(const Attend &a, int64_t rows, int64_t group) {
    const int64_t lanes = rows * group, padded = (a.dim + 15) / 16 * 16;
    return 2 * room<float>(lanes * padded) + room<typename Math::Query>(lanes * a.dim) + 4 * room<float>(lanes) +
           room<int32_t>(rows);
  }

  HeadRows(const Attend &a, QueryHeads heads, int64_t first, int64_t last, typename Math::Space &space, Scratch &memory)
      : a(a), kv_head(heads.kv_head), query(heads.first), group(heads.count), first(first), last(last),
        padded((a.dim + 15) / 16 * 16), space(space) {
    const int64_t lanes = (last - first) * group;
    block.acc = memory.take<float>(lanes * padded);
    total.acc = memory.take<float>(lanes * padded);
    q = memory.take<typename Math::Query>(lanes * a.dim);
    for (float **each : {&block.m, &block.l, &total.m, &total.l}) *each = memory.take<float>(lanes);
    block_of = memory.take<int32_t>(last - first);
  }

  void start() {
    all_seen = a.window ? 0 : seen_from(0, static_cast<int>((last - first) * group));
    for (int64_t row = first; row < last; ++row) {
      block_of[row - first] = -1;
      const T *from = static_cast<const T *>(a.q) + row * a.q_stride + query * a.dim;
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
  Lanes in_tensor(const Partial &parts, int64_t row) const { return {parts, row * a.heads + query, a.dim}; }

  // No row sees a key of the chunk from this one on; 1 where none sees any.
  int end_of(const Item &item) const {
    if (item.key_start + CHUNK <= all_seen) return CHUNK;
    int64_t end = 1;
    for (int64_t row = last_of(item) - 1; row >= first_of(item) && end < CHUNK; --row) {  // the last one most often sees most
      const int64_t seen = a.positions[row] + 1 - item.key_start;
      end = seen > end ? seen : end;
    }
    return static_cast<int>(end < CHUNK ? end : CHUNK);
  }

  // How its rows meet a chunk, `ahead` elements before those of `next`, if there is any.
  Visit visit(const Item &item, int64_t ahead, const Item *next) const {
    return {ahead, (last_of(item) - first_of(item)) * group, end_of(item), next ? end_of(*next) : CHUNK};
  }

  int64_t first_of_row(int64_t row) const { return a.window ? first_seen(a.positions[row], a.window) : 0; }

  // Keys of the chunk that a row may see: from..to-1 within the chunk; none if from >= to.
  void visible(int64_t row, int64_t key_start, int &from, int &to) const {
    const int64_t position = a.positions[row];
    const int64_t low = first_of_row(row) - key_start;
    const int64_t high = position + 1 - key_start;
    from = static_cast<int>(low < 0 ? 0 : low > CHUNK ? CHUNK : low);
    to = static_cast<int>(high < 0 ? 0 : high > CHUNK ? CHUNK : high);
  }

  void enter_block(int64_t from, int64_t to, int32_t index) {
    int others = 0;  // most often none: a loop that vectorises
    for (int64_t row = from; row < to; ++row) others += block_of[row - first] != index;
    if (!others) return;
    for (int64_t row = from, end; row < to; row = end) {  // runs of rows of one block
      const int32_t before = block_of[row - first];
      for (end = row; end < to && block_of[end - first] == before; ++end) block_of[end - first] = index;
      if (before >= 0 && before != index) close_block(row, end);
    }
  }

  void close_block(int64_t from, int64_t to) {
    [[maybe_unused]] const typename Math::template Tiny<false> kept;  // as wherever blocks are merged
    const int64_t end = (to - first) * group;
    for (int64_t lane = (from - first) * group; lane < end; lane += LANES) {
      const int n = static_cast<int>(end - lane < LANES ? end - lane : LANES);
      total.template merge<Math>(lane, block, padded, n);
      for (int r = 0; r < n; ++r) block.clear(lane + r, padded);
    }
  }

  // `count` chunks that meet the same rows, in the same block of keys.
  void walk(const Item *const *items, const Visit *visits, int count) {
    const int64_t from = first_of(*items[0]), to = last_of(*items[0]);
    enter_block(from, to, items[0]->key_start / BLOCK);
    Places<Math, Math::BATCH> places;
    Math *chunks = places.at(0);
    for (int i = 0; i < count; ++i)
      new (chunks + i)
          Math(Reader<Math>::open(a, static_cast<int64_t>(items[i]->slot) * a.kv_heads + kv_head, i, padded, visits[i], space));
    const int64_t begin = (from - first) * group, lanes = (to - from) * group;
    for (int64_t i = 0; i < lanes; i += Math::TOGETHER) {
      const int n = static_cast<int>(lanes - i < Math::TOGETHER ? lanes - i : Math::TOGETHER);
      if constexpr (Math::RUNNING) run_on(items, chunks, count, begin + i, n, i);
      else walk_lanes(*items[0], begin + i, n, *chunks, i);
    }
  }

  int64_t first_of(const Item &item) const { return item.row_begin > first ? item.row_begin : first; }
  int64_t last_of(const Item &item) const { return item.row_end < last ? item.row_end : last; }

  // `n` lanes from `lane` on all see the keys before this position.
  int64_t seen_from(int64_t lane, int n) const {
    int64_t least = a.positions[first + lane / group];
    for (int64_t row = first + lane / group; row <= first + (lane + n - 1) / group; ++row)
      least = a.positions[row] < least ? a.positions[row] : least;
    return least + 1;
  }

  // Whether any of `n` lanes sees a key of the chunk.
  bool see(const Item &item, int64_t lane, int n, Seen &seen) const {
    const int64_t end = item.key_start + CHUNK;
    seen.everything = end <= all_seen || (!a.window && end <= seen_from(lane, n));
    if (seen.everything) return true;
    bool any = false;
    for (int r = 0; r < n; ++r) {
      const int64_t row = first + (lane + r) / group;
      visible(row, item.key_start, seen.low[r], seen.high[r]);
      if (a.positions[row] == 0 || first_of_row(row) == a.positions[row]) seen.only |= 1u << r;
      any |= seen.low[r] < seen.high[r];
    }
    return any;
  }

  // Scores of `n` lanes from `lane` on, capped, with their bias; returns what they are still to be multiplied by.
  float biased_scores(const Item &item, int64_t lane, int n, const Math &math, float *scores, int64_t before) const {
    math.scores(n, q + lane * a.dim, scores, before);
    if (!a.bias && a.cap == 0.0f) return a.scale;
    float scale = a.scale;
    if (a.cap != 0.0f) {
      for (int i = 0; i < n * CHUNK; i += W) store(scores + i, soft_capped(load(scores + i) * splat(scale), a.cap));
      scale = 1.0f;
    }
    if (!a.bias) return scale;
    alignas(64) float bias[CHUNK];
    for (int r = 0; r < n; ++r) add_bias(bias_of(item.key_start, lane + r, bias), scale, scores + r * CHUNK);
    return 1.0f;
  }

  // `n` lanes from `lane` on meet a chunk; `before` lanes have met it already.
  void walk_lanes(const Item &item, int64_t lane, int n, const Math &math, int64_t before)
    requires ChunkPolicy<Math>
  {
    Seen seen;
    if (!see(item, lane, n, seen)) return;
    alignas(64) float scores[LANES * CHUNK], m[LANES], l[LANES];
    alignas(64) typename Math::Probability p[LANES * CHUNK];
    const float scale = biased_scores(item, lane, n, math, scores, before);
    math.probabilities(n, scores, seen, scale, p, m, l);
    Weights weights;
    block.template take<Math>(lane, n, m, l, weights);
    math.values(n, p, seen, block.acc + lane * padded, weights, before);
  }

  // The same for chunks whose products are added to the block's sums as they are: the values of several at once, but not of
  // those on two sides of a change of a lane's m.
  void run_on(const Item *const *items, const Math *chunks, int count, int64_t lane, int n, int64_t before)
    requires RunningPolicy<Math>
  {
    constexpr int GROUP = Math::GROUP, GROUPS = Math::TOGETHER / GROUP;
    typename Math::Waiting waiting[GROUPS];
    alignas(64) typename Math::Probability p[Math::BATCH][GROUPS][GROUP * CHUNK];
    const int groups = (n + GROUP - 1) / GROUP;
    for (int i = 0; i < count; ++i)
      for (int g = 0; g < groups; ++g) {
        const T *next = g + 1 < groups ? nullptr : i + 1 < count ? chunks[i + 1].k : chunks[0].v;
        waiting[g].lanes = g + 1 < groups ? GROUP : n - g * GROUP;
        wait(*items[i], chunks[i], lane + g * GROUP, (before + g * GROUP) / GROUP, next, p[i][g], waiting[g]);
      }
    chunks[0].values(waiting, groups, block.acc + lane * padded);
  }

  // A group of lanes from `lane` on, the `index`-th that meets the chunk: its probabilities p [lanes, 64], which then wait.
  template <typename Waiting>
  void wait(const Item &item, const Math &math, int64_t lane, int64_t index, const T *next, typename Math::Probability *p,
            Waiting &waiting) {
    const int n = waiting.lanes;
    Seen seen;
    if (!see(item, lane, n, seen)) return;
    alignas(64) float scores[Math::GROUP * CHUNK], keep[Math::GROUP];
    const float scale = biased_scores(item, lane, n, math, scores, index * Math::GROUP);
    float *acc = block.acc + lane * padded;
    const uint32_t changed =
        math.probabilities(n, scores, seen, scale, p, block.m + lane, block.l + lane, keep, math.fetch(index, next));
    if (changed) {
      math.values(&waiting, 1, acc);
      waiting.chunks = 0;
      multiply(lane, changed, keep);
    }
    math.add_to(waiting, p, seen, index);
    if (!math.masks(waiting)) return;
    math.values(&waiting, 1, acc);
    waiting.chunks = 0;
  }

  // The sums of the lanes in `which`, counted from `lane` on, times `by`.
  void multiply(int64_t lane, uint32_t which, const float *by) {
    for (; which; which &= which - 1) {
      const int r = __builtin_ctz(which);
      float *acc = block.acc + (lane + r) * padded;
      for (int64_t d = 0; d < padded; d += W) store(acc + d, load(acc + d) * splat(by[r]));
    }
  }

  static void add_bias(const float *bias, float scale, float *scores) {
    for (int j = 0; j < CHUNK; j += W) store(scores + j, madd(load(scores + j), splat(scale), load(bias + j)));
  }

  // Bias of the chunk's 64 keys; the table may end inside the chunk, behind the last visible key.
  const float *bias_of(int64_t key_start, int64_t lane, float *part) const {
    const float *from = a.bias + (query + lane % group) * a.bias_len + key_start;
    const int64_t there = a.bias_len - key_start;
    if (there >= CHUNK) return from;
    for (int64_t j = 0; j < CHUNK; ++j) part[j] = j < there ? from[j] : 0.0f;
    return part;
  }

  void finish() {
    if (a.to.block_of) {
      for (int64_t row = first; row < last; ++row) leave(row);
      return;
    }
    close_block(first, last);
    [[maybe_unused]] const typename Math::template Tiny<false> kept;
    for (int64_t row = first; row < last; ++row) {
      T *out = static_cast<T *>(a.out) + (row * a.heads + query) * a.dim;
      for (int64_t g = 0; g < group; ++g) {
        const int64_t lane = (row - first) * group + g;
        total.write(lane, padded, a.dim, out + g * a.dim, sink_of<Math>(a.sinks, query + g, total.m[lane]));
      }
    }
  }

  // The row's state as it stands, for a call that continues it.
  void leave(int64_t row) const {
    if (a.to.total.acc) here(total, row).copy_to(in_tensor(a.to.total, row), group, a.dim);
    here(block, row).copy_to(in_tensor(a.to.block, row), group, a.dim);
    if (query == 0) a.to.block_of[row] = block_of[row - first];  // the same for all heads: one thread writes it
  }
};

}  // namespace headrace::HEADRACE_NS
