// Attention of lanes over one chunk by tiles of AMX: the layouts and the softmax of paired.h, products by tiles.h.
//
// A group of up to 16 lanes is the rows of a tile. D is a multiple of 32.
#pragma once

#include "paired.h"
#include "tiles.h"

namespace headrace::HEADRACE_NS {

#ifdef __AMX_BF16__

constexpr bool tiled(int64_t dim) { return dim % STEP_INPUTS == 0; }

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
    groups = (lanes + TILE - 1) / TILE;
  }

  // Keys and values that lie in a cache already; `masked` is room for 64 D further ones.
  Tiled(const bf16 *k, const bf16 *v, int64_t dim, bf16 *masked, Tiles &tiles)
      : Paired(k, v, dim), tiles(tiles), masked(masked) {}

  // p[lane][j] = sum over d of q[lane][d] * k[d][j]
  void scores(int n, const bf16 *q, float *p, int64_t before) const {
    for (int r = 0; r < n; r += TILE) {
      tiles.take(n - r < TILE ? n - r : TILE);
      const bf16 *next = share(after_keys(), before + r);
      by_lines(next, [&](auto lines) { score_steps<lines>(q + r * dim, p + r * CHUNK, next); });
    }
  }

  // acc[lane] = acc[lane] * keep + take * (sum over visible keys of p[lane][j] * v[j]).
  void values(int n, const bf16 *p, const Seen &seen, float *acc, const Weights &weights, int64_t before) const {
    uint64_t keys = seen.everything ? ~0ull : 0;
    for (int r = 0; r < n && !seen.everything; ++r) keys |= seen.mask(r);
    const bf16 *from = keys == ~0ull ? v : mask(keys);
    const int full = n / TILE * TILE;
    for (int r = 0; r < n; r = r < full ? full : n) {  // the full groups, then the rest
      const int rows = r < full ? TILE : n - r;
      tiles.take(rows);
      const bf16 *next = share(after_values(), before + r);
      by_lines(next, [&](auto lines) {
        value_pairs<lines>(r < full ? full / TILE : 1, rows, p + r * CHUNK, from, acc + r * dim, weights.keep + r,
                           weights.take + r, next);
      });
    }
  }

 private:
  static constexpr int64_t LINES = 64;  // in the weights of a step
  static constexpr int64_t PAIR = 32;   // columns that the tiles take together when values are added up
  int64_t groups = 1;                   // of lanes that meet the chunk: each fetches its share of what is read next

  const bf16 *after_keys() const { return groups == 1 ? v : ahead ? k + ahead : nullptr; }
  const bf16 *after_values() const { return !ahead ? nullptr : (groups == 1 ? k : v) + ahead; }
  const bf16 *share(const bf16 *next, int64_t before) const {
    return next ? next + before / TILE * dim * CHUNK / groups : nullptr;
  }

  template <typename F> void by_lines(const bf16 *next, F f) const {
    with_lines<LINES>(next ? static_cast<int>((LINES + groups - 1) / groups) : 0, f);
  }

  template <int LINES> HEADRACE_APART void score_steps(const bf16 *q, float *p, const bf16 *next) const {
    clear_sums();
    tile_steps<LINES>(q, dim, k, 2 * CHUNK, dim / STEP_INPUTS, {next, LINES * LINE, 0});
    store_row(p, CHUNK);
  }

  // `count` groups of `rows` lanes. While the tiles take the sums of 32 columns, those of 32 columns before are stored, and
  // others before them folded.
  template <int LINES>
  HEADRACE_APART void value_pairs(int64_t count, int rows, const bf16 *p, const bf16 *from, float *acc,
                                  const float *keep, const float *take, const bf16 *next) const {
    alignas(64) float sums[4][TILE * PAIR];
    const int64_t pairs = dim / PAIR, last = count * pairs;
    Place at, fold;
    auto turn = [&](int64_t t, auto odd) HEADRACE_ALWAYS_INLINE {
      if (t < last) {
        if (at.pair == 0) load_probabilities(p + at.group * TILE * CHUNK);
        pair_sums<odd>(from + at.pair * 2 * PAIR);
        if (LINES > 0) fetch_lines<LINES>(next + t * LINES * LINE);
        at.advance(pairs);
      }
      if (t >= 1 && t <= last) store_pair<!odd>(sums[(t - 1) % 4]);
      if (t >= 4 && t - 4 < last) {
        const int64_t lane = fold.group * TILE;
        fold_pair(rows, sums[t % 4], acc + lane * dim + fold.pair * PAIR, keep + lane, take + lane);
        fold.advance(pairs);
      }
    };
    for (int64_t t = 0; t < last + 4; t += 2) {
      turn(t, Constant<0>{});
      turn(t + 1, Constant<1>{});
    }
  }

  struct Place {
    int64_t group = 0, pair = 0;
    void advance(int64_t pairs) {
      if (++pair == pairs) ++group, pair = 0;
    }
  };

  static HEADRACE_ALWAYS_INLINE void load_probabilities(const bf16 *p) {
    _tile_loadd(4, p, 2 * CHUNK);
    _tile_loadd(5, p + STEP_INPUTS, 2 * CHUNK);
  }

  // Sums 0 and 1, or 2 and 3, = the probabilities times 32 columns of values.
  template <int ODD> HEADRACE_ALWAYS_INLINE void pair_sums(const bf16 *w) const {
    const bf16 *second = w + TILE * 2 * dim;  // of keys 32 to 63
    if constexpr (ODD) {
      _tile_zero(2);
      _tile_zero(3);
      _tile_loadd(6, w, 4 * dim);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, w + LINE, 4 * dim);
      _tile_dpbf16ps(3, 4, 7);
      _tile_loadd(6, second, 4 * dim);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, second + LINE, 4 * dim);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(6, w, 4 * dim);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + LINE, 4 * dim);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, second, 4 * dim);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, second + LINE, 4 * dim);
      _tile_dpbf16ps(1, 5, 7);
    }
  }

  template <int ODD> static HEADRACE_ALWAYS_INLINE void store_pair(float *sums) {
    if constexpr (ODD) {
      _tile_stored(2, sums, 4 * PAIR);
      _tile_stored(3, sums + TILE, 4 * PAIR);
    } else {
      _tile_stored(0, sums, 4 * PAIR);
      _tile_stored(1, sums + TILE, 4 * PAIR);
    }
  }

  void fold_pair(int rows, const float *sums, float *acc, const float *keep, const float *take) const {
    for (int r = 0; r < rows; ++r, sums += PAIR, acc += dim) {
      const __m512 kept = _mm512_set1_ps(keep[r]), taken = _mm512_set1_ps(take[r]);
      each<2>([&](auto c) HEADRACE_ALWAYS_INLINE {
        _mm512_store_ps(acc + c * 16, _mm512_fmadd_ps(_mm512_load_ps(sums + c * 16), taken,
                                                      _mm512_mul_ps(_mm512_load_ps(acc + c * 16), kept)));
      });
    }
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
};

#endif

}  // namespace headrace::HEADRACE_NS
