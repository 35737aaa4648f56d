// Attention of lanes over one chunk by tiles of AMX: the layouts and the softmax of paired.h, products by tiles.h.
//
// A group of up to 16 lanes is the rows of a tile. D is a multiple of 32, at most 256.
#pragma once

#include "paired.h"
#include "tiles.h"

namespace headrace::HEADRACE_NS {

#ifdef __AMX_BF16__

constexpr int64_t MOST_DIM = 256;  // the outputs of a group of lanes lie on the stack

constexpr bool tiled(int64_t dim) { return dim % STEP_INPUTS == 0 && dim <= MOST_DIM; }

struct TileSpace : Space {
  Tiles tiles;
};

struct Tiled : Paired {
  using Space = TileSpace;
  Tiles &tiles;
  bf16 *masked;  // [64 D]: room for values of which some are masked

  static int64_t scratch(int64_t dim) { return CHUNK * dim / 2; }

  Tiled(const bf16 *k, const bf16 *v, int64_t dim, int64_t, int64_t ahead, int64_t lanes, Space &space)
      : Paired(k, v, dim), tiles(space.tiles), masked(reinterpret_cast<bf16 *>(space.scratch)) {
    this->ahead = ahead;
    groups = (lanes + LANES - 1) / LANES;
  }

  // Keys and values that lie in a cache already; `masked` is room for 64 D further ones.
  Tiled(const bf16 *k, const bf16 *v, int64_t dim, bf16 *masked, Tiles &tiles)
      : Paired(k, v, dim), tiles(tiles), masked(masked) {}

  // p[lane][j] = sum over d of q[lane][d] * k[d][j]
  void scores(int n, const bf16 *q, float *p, int64_t before) const {
    tiles.take(n);
    const bf16 *next = groups == 1 ? v : ahead ? k + ahead : nullptr;
    by_lines(next, [&](auto lines) { score_steps<lines>(q, p, share(next, before)); });
  }

  // acc[lane] = acc[lane] * keep + take * (sum over visible keys of p[lane][j] * v[j]).
  void values(int n, const bf16 *p, const Seen &seen, float *acc, const Weights &weights, int64_t before) const {
    alignas(64) float sums[LANES * MOST_DIM];
    uint64_t keys = seen.everything ? ~0ull : 0;
    for (int r = 0; r < n && !seen.everything; ++r) keys |= seen.mask(r);
    const bf16 *from = keys == ~0ull ? v : mask(keys);
    tiles.take(n);
    const bf16 *next = !ahead ? nullptr : (groups == 1 ? k : v) + ahead;
    by_lines(next, [&](auto lines) { value_steps<lines>(p, from, sums, share(next, before)); });
    for (int r = 0; r < n; ++r) fold_row(sums + r * dim, acc + r * dim, weights.keep[r], weights.take[r]);
  }

 private:
  static constexpr int64_t LINES = 64;  // in the weights of a step
  int64_t groups = 1;                   // of lanes that meet the chunk: each fetches its share of what is read next

  const bf16 *share(const bf16 *next, int64_t before) const {
    return next ? next + before / LANES * dim * CHUNK / groups : k;
  }

  template <typename F> void by_lines(const bf16 *next, F f) const {
    with_lines<LINES>(next ? static_cast<int>((LINES + groups - 1) / groups) : 0, f);
  }

  template <int LINES> HEADRACE_APART void score_steps(const bf16 *q, float *p, const bf16 *next) const {
    clear_sums();
    tile_steps<LINES>(q, dim, k, 2 * CHUNK, dim / STEP_INPUTS, {next, LINES * LINE, 0});
    store_row(p, CHUNK);
  }

  // sums [16][D]
  template <int LINES>
  HEADRACE_APART void value_steps(const bf16 *p, const bf16 *from, float *sums, const bf16 *next) const {
    constexpr int64_t STEPS = CHUNK / STEP_INPUTS;
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64, next += STEPS * LINES * LINE) {
      clear_sums();
      tile_steps<LINES>(p, CHUNK, from + 2 * d, 2 * dim, STEPS, {next, LINES * LINE, 0});
      store_row(sums + d, dim);
    }
    if (d == dim) return;
    clear_sums();
    half_steps(p, CHUNK, from + 2 * d, 2 * dim, STEPS);
    _tile_stored(0, sums + d, 4 * dim);
    _tile_stored(1, sums + d + 16, 4 * dim);
  }

  // The values with 0 for keys that no lane sees: they may be garbage, and 0 times NaN is NaN.
  HEADRACE_APART const bf16 *mask(uint64_t keys) const {
    for (int pair = 0; pair < CHUNK / 2; ++pair) {
      const __m512i keep = half_mask(keys >> (2 * pair) & 3);
      for (int64_t d = pair * 2 * dim; d < (pair + 1) * 2 * dim; d += LINE)
        _mm512_store_si512(masked + d, _mm512_and_si512(_mm512_loadu_si512(v + d), keep));
    }
    return masked;
  }

  void fold_row(const float *sums, float *acc, float keep, float take) const {
    const __m512 kept = _mm512_set1_ps(keep), taken = _mm512_set1_ps(take);
    for (int64_t d = 0; d < dim; d += 16)
      _mm512_store_ps(acc + d, _mm512_fmadd_ps(_mm512_load_ps(sums + d), taken,
                                               _mm512_mul_ps(_mm512_load_ps(acc + d), kept)));
  }
};

#endif

}  // namespace headrace::HEADRACE_NS
