// Attention of lanes over chunks by tiles of AMX: the layouts of vnni.h, the softmax of running.h, products by tiles.h.
//
// A group of up to 32 lanes is the rows of one tile or of two. Tiles and vectors take turns: while tiles are multiplied, one
// of the two multipliers for vectors stands still, so that nothing is won by mixing them. D is a multiple of 32.
#pragma once

#include "attention/vnni.h"
#include "isa/tiles.h"

namespace headrace::HEADRACE_NS {

#ifdef __AMX_BF16__

constexpr bool is_amx(int64_t dim) { return dim % STEP_INPUTS == 0; }

struct TileSpace : ChunkSpace<bf16> {
  Tiles tiles;
};

// Chunks whose probabilities p [lanes, 64] wait for their values v, in so many steps; what is fetched meanwhile, or null.
template <int MOST> struct Pending {
  const bf16 *p[MOST], *v[MOST], *next[MOST];
  int steps[MOST], next_steps[MOST], chunks = 0, lanes = 0;
};

struct Amx : Vnni {
  using Space = TileSpace;
  static constexpr int GROUP = 2 * TILE;  // lanes that go together through the tiles
  static constexpr int TOGETHER = 64;     // lanes for each reading of a chunk from L2
  static constexpr int BATCH = 4;         // most chunks whose probabilities wait, so that sums are met once for their values
  using Waiting = Pending<BATCH>;
  static_assert(GROUP <= LANES);

  Tiles &tiles;
  bf16 *masked;  // [64 D]: room for values of which some are masked

  static int64_t scratch(int64_t dim) { return CHUNK * dim; }

  Amx(const ChunkOf<bf16> &chunk, int64_t dim, int64_t, const Visit &visit, Space &space)
      : Vnni(chunk.k, chunk.v, dim), tiles(space.tiles), masked(space.scratch) {
    stored = chunk.stored;
    ahead = visit.ahead;
    groups = (visit.lanes + GROUP - 1) / GROUP;
    few = visit.lanes <= TILE;
    if (few) keys = visit.keys, next_keys = visit.next_keys;  // what more lanes see is not looked at
  }

  // Keys and values that lie in a cache already; `masked` is room for 64 D further ones.
  Amx(const bf16 *k, const bf16 *v, int64_t dim, bf16 *masked, Tiles &tiles) : Vnni(k, v, dim), tiles(tiles), masked(masked) {}

  // s[lane][j] = sum over d of q[lane][d] * k[d][j]
  void scores(int n, const bf16 *q, float *s, int64_t before) const {
    shape(n);
    if (n <= TILE) {
      if (steps_of(keys) == 1) return few && ahead ? score_strip<2, 32>(q, s) : score_strip<2, 0>(q, s);
      return few && ahead ? score_strip<4, 64>(q, s) : score_strip<4, 0>(q, s);
    }
    with_fetch(ahead != 0, [&](auto lines, auto each) {
      this->score_squares<lines, each>(q, s, stored + ahead + before / GROUP * steps() * each * LINE);
    });
  }

  // acc[lane] += sum over the chunks that wait and their keys of p[lane][j] * v[j], for `count` groups of lanes.
  void values(const Waiting *all, int count, float *acc) const {
    for (int64_t d = 0; d < dim; d += 32)
      for (int g = 0; g < count; ++g)
        if (all[g].chunks > 0 && all[g].lanes > TILE) {
          shape(all[g].lanes);
          float *to = acc + g * GROUP * dim + d;
          with_fetch(*all[g].next, [&](auto lines, auto each) { this->value_square<lines, each>(all[g], d, to); });
        }
    const int last = count - 1;  // the others are full
    if (all[last].chunks > 0 && all[last].lanes <= TILE) value_strips(all[last], acc + last * GROUP * dim);
  }

  // The values, with 0 for keys that no lane sees: they may be garbage, and 0 times NaN is NaN.
  const bf16 *visible_values(int n, const Seen &seen) const {
    const uint64_t these = seen.union_of(0, n);
    return these == ~0ull ? v : mask(these);
  }

  // A chunk more that waits, for the `index`-th group of lanes that meets it.
  void add_to(Waiting &waiting, const bf16 *p, const Seen &seen, int64_t index) const {
    waiting.p[waiting.chunks] = p;
    waiting.v[waiting.chunks] = visible_values(waiting.lanes, seen);
    const bf16 *of_few = few ? stored + ahead : nullptr;
    const bf16 *next = waiting.lanes > TILE ? v + ahead + index * steps() * lines_each() * LINE : of_few;
    waiting.next[waiting.chunks] = ahead ? next : nullptr;
    waiting.next_steps[waiting.chunks] = steps_of(next_keys);
    waiting.steps[waiting.chunks++] = steps_of(keys);
  }

  // Whether the last chunk's values are masked: there is room for those of one.
  bool masks(const Waiting &waiting) const { return waiting.v[waiting.chunks - 1] == masked; }

  // What the `index`-th group of lanes that meets this chunk fetches while it takes its probabilities: `next`, which is read
  // at once, if it is not null, and its share of what steps leave of the chunk ahead. Nothing without a chunk ahead: the last
  // one, or copies that lie in the cache.
  Fetch fetch(int64_t index, const bf16 *next) const {
    const int64_t lines = 2 * dim, near = ahead && next ? lines / GROUP : 0;
    if (groups == 1)
      return {next, {stored + ahead, v + ahead}, near, ahead && !few ? (lines / 4 + GROUP - 1) / GROUP : 0, true};
    const int64_t fetched = groups * steps() * lines_each();
    const int64_t each = (lines - fetched + groups * GROUP - 1) / (groups * GROUP), first = fetched + index * each * GROUP;
    return {next, {stored + ahead + first * LINE, v + ahead + first * LINE}, near, ahead && first < lines ? each : 0, false};
  }

 private:
  int64_t groups = 1;  // of lanes that meet the chunk
  bool few = true;     // no more than the rows of a tile

  int64_t steps() const { return dim / TILE; }  // of a group of up to 32 lanes with the keys, and with the values

  static int steps_of(int keys) { return (keys + STEP_INPUTS - 1) / STEP_INPUTS; }  // with the values of so many

  // Chunks ahead go to L2 at an even pace, since no more than a dozen or two of cache lines can be on their way: in each step
  // of 32 lanes with the keys some lines of the keys ahead, with the values of the values, and the rest while probabilities
  // are taken. A single group takes 24 of 32 lines and leaves the last eight; two or three take 8 each, four 4. More need so
  // long that it does not matter.
  int64_t lines_each() const { return groups > 4 ? 0 : groups > 3 ? 4 : groups > 1 ? 8 : 32; }

  // f(lines fetched in a step, lines between the first ones of two steps)
  template <typename F> void with_fetch(bool any, F f) const {
    switch (any ? lines_each() : 0) {
      case 32: return f(Constant<24>{}, Constant<32>{});
      case 8: return f(Constant<8>{}, Constant<8>{});
      case 4: return f(Constant<4>{}, Constant<4>{});
      default: return f(Constant<0>{}, Constant<0>{});
    }
  }

  void shape(int n) const { n > TILE ? tiles.take(TILE, n - TILE) : tiles.take(n); }

  // Of 16 TILES keys, fetching their values.
  template <int TILES, int LINES> HEADRACE_APART void score_strip(const bf16 *q, float *s) const {
    clear_sums();
    tile_steps<LINES, true, TILES>(q, dim, k, 2 * CHUNK, dim / STEP_INPUTS, {v, LINES * LINE, 0});
    store_row<TILES>(s, CHUNK);
  }

  template <int LINES, int EACH> HEADRACE_APART void score_squares(const bf16 *q, float *s, const bf16 *next) const {
    for (int64_t half = 0; half < CHUNK; half += 32) {
      clear_sums();
      square_steps<LINES>(q, dim, k + 2 * half, 2 * CHUNK, dim / STEP_INPUTS, {next + half * dim * EACH / 32, EACH * LINE, 0});
      store_square(s + half, CHUNK);
    }
  }

  void value_strips(const Waiting &waiting, float *acc) const {
    shape(waiting.lanes);
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) value_strip(waiting, d, acc + d);
    if (d < dim) value_half(waiting, d, acc + d);
  }

  // Columns d .. d + 31 of two tiles of lanes, 64 or 32 columns of one.
  template <int LINES, int EACH> HEADRACE_APART void value_square(const Waiting &w, int64_t d, float *acc) const {
    load_square(acc, dim);
    for (int c = 0; c < w.chunks; ++c)
      square_steps<LINES>(w.p[c], CHUNK, w.v[c] + 2 * d, 2 * dim, CHUNK / STEP_INPUTS, after(w, c, 2 * d * EACH, EACH));
    store_square(acc, dim);
  }

  void value_strip(const Waiting &w, int64_t d, float *acc) const {
    load_row(acc, dim);
    for (int c = 0; c < w.chunks; ++c) {
      const bf16 *p = w.p[c], *values = w.v[c] + 2 * d, *next = w.next[c] ? w.next[c] + d * CHUNK : nullptr;
      const bool half = w.steps[c] == 1, next_half = w.next_steps[c] == 1;
      if (!next) half ? strip_values<1, 0, 4>(p, values, p) : strip_values<2, 0, 4>(p, values, p);
      else if (next_half) half ? strip_values<1, 64, 2>(p, values, next) : strip_values<2, 32, 2>(p, values, next);
      else half ? strip_values<1, 128, 4>(p, values, next) : strip_values<2, 64, 4>(p, values, next);
    }
    store_row(acc, dim);
  }

  // The first 32 STEPS keys' part in 64 columns, fetching in each step LINES lines of what is next, OF_FOUR of each four.
  template <int STEPS, int LINES, int OF_FOUR>
  HEADRACE_APART void strip_values(const bf16 *p, const bf16 *values, const bf16 *next) const {
    tile_steps<LINES, true, 4, OF_FOUR>(p, CHUNK, values, 2 * dim, STEPS, {next, LINES * LINE * 4 / OF_FOUR, 0});
  }

  static Ahead after(const Waiting &w, int c, int64_t offset, int lines) {
    if (!w.next[c]) return {w.v[c], 0, 0};
    return {w.next[c] + offset, lines * LINE, 0};
  }

  HEADRACE_APART void value_half(const Waiting &w, int64_t d, float *acc) const {
    load_row<2>(acc, dim);
    for (int c = 0; c < w.chunks; ++c)
      tile_steps<0, true, 2>(w.p[c], CHUNK, w.v[c] + 2 * d, 2 * dim, w.steps[c], {w.v[c], 0, 0});
    store_row<2>(acc, dim);
  }

  HEADRACE_APART const bf16 *mask(uint64_t these) const {
    for (int pair = 0; pair < steps_of(keys) * TILE; ++pair) {
      const __m512i keep = half_mask(these >> (2 * pair) & 3);
      for (int64_t d = pair * 2 * dim; d < (pair + 1) * 2 * dim; d += LINE)
        _mm512_store_si512(masked + d, _mm512_and_si512(_mm512_loadu_si512(v + d), keep));
    }
    return masked;
  }
};

static_assert(RunningPolicy<Amx>);

#endif

}  // namespace headrace::HEADRACE_NS
