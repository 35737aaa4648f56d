// Probabilities whose reference a lane keeps as long as it can, so that the sums of several chunks are added up as they are.
//
// A lane's reference is 2^m, m a whole number: it rises, to the least above the greatest score, only when a score (in units
// of log 2) is more than HEADROOM above it. So probabilities are up to 2^HEADROOM, and sums are multiplied seldom, and then
// by powers of two: they are the same numbers, scaled, as with any other reference.
#pragma once

#include "paired.h"

namespace headrace::HEADRACE_NS {

#ifdef __AVX512BF16__

// What is fetched while a group of lanes takes its probabilities: so many cache lines of `near` for each lane to L1, of both
// `far` to L2.
struct Fetch {
  const bf16 *near, *far[2];
  int64_t near_each, far_each;
};

// Raw scores s [n, 64] -> probabilities p [n, 64] relative to 2^m, rounded to bf16, 0 where the lane sees nothing. m [n] is
// -inf at first. l [n] grows by the sum of the probabilities before they
// are rounded; where a lane sees one key of the chunk, of the rounded one, so that a key alone has the weight 1. Where a lane's m rises, l and later its sums are multiplied by
// keep [n]. `weights` [64], or null, is what probabilities are multiplied by before they are rounded; l then sums those that
// are neither multiplied nor rounded.
struct RunningSoftmax {
  static constexpr float HEADROOM = 8.0f, RAISE = 768.0f;
  static constexpr int16_t TOO_MUCH = 0x4380;  // 2^HEADROOM in bf16; greater numbers, infinity and NaN have greater bits
  __m512 factor;  // of scores, to units of log 2
  float *s;
  const Seen &seen;
  bf16 *p;
  float *m, *l, *keep;
  const float *weights;
  const Fetch &fetch;

  // Returns the lanes whose m rises, as bits.
  uint32_t run(int n) const {
    if (!seen.everything)
      for (int r = 0; r < n; ++r) Paired::hide(s + r * CHUNK, seen.mask(r));
    const FlushTiny now;
    return seen.everything && !weights ? lanes<true>(n) : lanes<false>(n);
  }

 private:
  // Results below 1e-38 are 0 from here to the end of the scope, and take no longer than others.
  struct FlushTiny {
    const unsigned before = _mm_getcsr();
    FlushTiny() { _mm_setcsr(before | _MM_FLUSH_ZERO_ON); }
    ~FlushTiny() { _mm_setcsr(before); }
  };

  // 2^x, at most 9e-5 of it from the truth (rounding to bf16: 4e-3), and 1 for 0; `same` is x plus any whole number.
  static HEADRACE_ALWAYS_INLINE __m512 power(__m512 same, __m512 x) {
    const __m512 r = _mm512_reduce_ps(same, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 for -inf
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(7.70672403e-2f), r, _mm512_set1_ps(2.27644978e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.95116631e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x);
  }

  // PLAIN: all see everything, and there are no weights.
  template <bool PLAIN> uint32_t lanes(int n) const {
    uint32_t changed = 0;
    int r = 0;
    for (; r + 16 <= n; r += 16)
      if (!PLAIN || !steady(r)) changed |= of<16, PLAIN>(r) << r;
    for (; r + 4 <= n; r += 4) changed |= of<4, PLAIN>(r) << r;
    for (; r < n; ++r) changed |= of<1, PLAIN>(r) << r;
    return changed;
  }

  // 16 lanes that keep their m. False, and p to be done again, if one has none yet or a score may be too far above it: then
  // there is a probability of 2^HEADROOM or more, or no number.
  HEADRACE_APART bool steady(int first) const {
    alignas(64) float base[16];
    store(base, load(m + first) + splat(RAISE));
    __m512i most = _mm512_setzero_si512();
    __m512 fours[4];
    each<4>([&](auto j) HEADRACE_ALWAYS_INLINE {
      __m512 sum[4];
      each<4>([&](auto b) HEADRACE_ALWAYS_INLINE {
        sum[b] = this->row<true>(first + j + b * 4, _mm512_set1_ps(base[j + b * 4]), most);
      });
      fours[j] = to_fours<4>(sum, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; });
    });
    if (_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(TOO_MUCH))) return false;
    store(l + first, load(l + first) + from_fours(fours, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; }));
    return true;
  }

  // N lanes from `first` on; which of them have a new m. Lanes first + j + b N/4 go together through the first steps.
  template <int N, bool PLAIN> HEADRACE_APART uint32_t of(int first) const {
    constexpr int QUADS = N < 4 ? 1 : N / 4, LANES_EACH = N < 4 ? 1 : 4;
    __m512 fours[QUADS];
    each<QUADS>([&](auto j) HEADRACE_ALWAYS_INLINE {
      __m512 top[LANES_EACH];
      each<LANES_EACH>([&](auto b) HEADRACE_ALWAYS_INLINE {
        const float *row = s + (first + j + b * QUADS) * CHUNK;
        top[b] = _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(row), _mm512_load_ps(row + 16)),
                               _mm512_max_ps(_mm512_load_ps(row + 32), _mm512_load_ps(row + 48)));
      });
      fours[j] = to_fours<LANES_EACH>(top, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return max(a, b); });
    });
    const __m512 top = raised((__m512)from_fours(fours, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return max(a, b); }));
    const __m512 one = _mm512_set1_ps(1.0f), raise = _mm512_set1_ps(RAISE), old = (__m512)load_lanes<N>(m + first);
    const uint32_t changed =
        _mm512_cmp_ps_mask(_mm512_sub_ps(top, _mm512_add_ps(old, raise)), _mm512_set1_ps(HEADROOM), _CMP_GT_OQ) &
        ((1u << N) - 1);
    const __m512 above = _mm512_roundscale_ps(top, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    const __m512 now = _mm512_mask_sub_ps(old, changed, above, raise);
    const __m512 kept = _mm512_mask_scalef_ps(one, changed, one, _mm512_sub_ps(old, now));
    const uint32_t some = _mm512_cmp_ps_mask(now, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ);
    alignas(64) float base[16];
    _mm512_store_ps(base, _mm512_mask_add_ps(raise, some, now, raise));
    store_lanes<N>(m + first, (vf)now);
    if (changed) store_lanes<N>(keep + first, (vf)kept);
    each<QUADS>([&](auto j) HEADRACE_ALWAYS_INLINE {
      __m512 sum[LANES_EACH];
      each<LANES_EACH>([&](auto b) HEADRACE_ALWAYS_INLINE {
        __m512i most = _mm512_setzero_si512();  // not asked for: m is right
        sum[b] = this->row<PLAIN>(first + j + b * QUADS, _mm512_set1_ps(base[j + b * QUADS]), most);
      });
      fours[j] = to_fours<LANES_EACH>(sum, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; });
    });
    const __m512 sum = (__m512)from_fours(fours, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; });
    store_lanes<N>(l + first, (vf)_mm512_fmadd_ps((__m512)load_lanes<N>(l + first), kept, sum));
    return changed;
  }

  // Scores in units of log 2, raised so far that they are rounded to multiples of 2^-14 (while below 256): then taking away
  // any reference is exact, and a probability has the same digits whatever the reference.
  __m512 raised(__m512 scores) const { return _mm512_fmadd_ps(scores, factor, _mm512_set1_ps(RAISE)); }

  // The probabilities of one lane, whose m, raised, is `base`; `most`: the greatest so far. Returns their sums of four.
  template <bool PLAIN> HEADRACE_ALWAYS_INLINE __m512 row(int lane, __m512 base, __m512i &most) const {
    const float *from = s + lane * CHUNK;
    __m512 x[4], sum;
    for (int64_t i = lane * fetch.near_each; i < (lane + 1) * fetch.near_each; ++i) fetch_lines<1>(fetch.near + i * LINE);
    for (int64_t i = lane * fetch.far_each; i < (lane + 1) * fetch.far_each; ++i) {
      fetch_lines<1, false>(fetch.far[0] + i * LINE);
      fetch_lines<1, false>(fetch.far[1] + i * LINE);
    }
    each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
      const __m512 score = this->raised(_mm512_load_ps(from + c * 16));
      x[c] = power(score, _mm512_sub_ps(score, base));
    });
    const uint64_t mask = PLAIN ? ~0ull : seen.mask(lane);
    if (!PLAIN) each<4>([&](auto c) HEADRACE_ALWAYS_INLINE { x[c] = _mm512_maskz_mov_ps(static_cast<__mmask16>(mask >> (16 * c)), x[c]); });
    sum = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), x[2]), x[3]);
    if (!PLAIN) {
      if (weights) Paired::weigh(mask, weights, x);
    }
    const __m512bh low = _mm512_cvtne2ps_pbh(x[1], x[0]), high = _mm512_cvtne2ps_pbh(x[3], x[2]);
    _mm512_store_si512(p + lane * CHUNK, (__m512i)low);
    _mm512_store_si512(p + lane * CHUNK + 32, (__m512i)high);
    most = _mm512_max_epu16(most, _mm512_max_epu16((__m512i)low, (__m512i)high));
    if (PLAIN || weights || (mask & (mask - 1))) return sum;
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    return _mm512_dpbf16_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), low, ones), high, ones);
  }

  template <int N> static HEADRACE_ALWAYS_INLINE vf load_lanes(const float *from) {
    return N == 16 ? load(from) : load_part(from, N);
  }
  template <int N> static HEADRACE_ALWAYS_INLINE void store_lanes(float *to, vf x) {
    N == 16 ? store(to, x) : store_part(to, x, N);
  }
};

#endif

}  // namespace headrace::HEADRACE_NS
