// Probabilities whose reference a lane keeps as long as it can, so that the sums of several chunks are added up as they are.
//
// A lane's reference is 2^m, m a whole number: it rises, to the least above the greatest score, only when a score (in units
// of log 2) is more than HEADROOM above it. So probabilities are up to 2^HEADROOM, and sums are multiplied seldom, and then
// by powers of two: they are the same numbers, scaled, as with any other reference.
#pragma once

#include "lanes.h"
#include "pairs.h"

namespace headrace::HEADRACE_NS {

#ifdef __AVX512BF16__

constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0, at most 3 ulp from the truth; about 1e-38 for all x below -126.
static inline __m512 exp2(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // the second operand wins where it is NaN
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.3202860e-3f);
  for (const float next : {9.6749528e-3f, 5.5510478e-2f, 2.4022166e-1f, 6.9314660e-1f, 1.0f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(next));
  return _mm512_scalef_ps(y, n);
}

// What is fetched while a group of lanes takes its probabilities: so many cache lines of `near` for each lane to L1, of both
// `far` to L2.
struct Fetch {
  const bf16 *near, *far[2];
  int64_t near_each, far_each;
  bool gaps;
};

// Raw scores s [n, 64] -> probabilities p [n, 64] relative to 2^m, rounded to bf16, 0 where the lane sees nothing. m [n] is
// -inf at first. l [n] grows by the sum of the unrounded ones; a key that is the only one its row ever sees has the weight 1,
// so there by the rounded one. Where a lane's m rises, l and later its sums are multiplied by keep [n]. `weights` [64], or
// null, is what probabilities are multiplied by before they are rounded, but not in the sum.
struct RunningSoftmax {
  static constexpr float HEADROOM = 8.0f;
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
      for (int r = 0; r < n; ++r) hide(s + r * CHUNK, seen.mask(r));
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

  // 2^(t - m), at most 3e-6 of it from the truth, m a whole number. Its digits depend on t alone: they are those of 2^r, r
  // the part of t behind the point, and taking away m rounds down, never across a whole number.
  static HEADRACE_ALWAYS_INLINE __m512 power(__m512 t, __m512 m) {
    const __m512 r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 for -inf
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.34251544e-2f), r, _mm512_set1_ps(5.22453740e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.41278556e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.93045155e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, _mm512_sub_round_ps(t, m, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  }

  // PLAIN: all see everything, and there are no weights.
  template <bool PLAIN> uint32_t lanes(int n) const {
    uint32_t changed = 0;
    int r = 0;
    for (; r + 16 <= n; r += 16) changed |= some<16, PLAIN>(r) << r;
    for (; r + 4 <= n; r += 4) changed |= some<4, PLAIN>(r) << r;
    for (; r < n; ++r) changed |= some<1, PLAIN>(r) << r;
    return changed;
  }

  template <int N, bool PLAIN> HEADRACE_ALWAYS_INLINE uint32_t some(int first) const {
    return PLAIN && steady<N>(first) ? 0 : of<N, PLAIN>(first);
  }

  // N lanes that keep their m. False, and p to be done again, if one has none yet or a score may be too far above it: then
  // there is a probability of 2^HEADROOM or more, or no number.
  template <int N> HEADRACE_APART bool steady(int first) const {
    __m512i most = _mm512_setzero_si512();
    const vf sum = sums<N, true>(first, m + first, most);
    if (_mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(TOO_MUCH))) return false;
    store_lanes<N>(l + first, load_lanes<N>(l + first) + sum);
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
    const vf greatest = from_fours(fours, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return max(a, b); });
    const __m512 top = _mm512_mul_ps((__m512)greatest, factor), one = _mm512_set1_ps(1.0f), old = (__m512)load_lanes<N>(m + first);
    const uint32_t changed =
        _mm512_cmp_ps_mask(_mm512_sub_ps(top, old), _mm512_set1_ps(HEADROOM), _CMP_GT_OQ) &
        ((1u << N) - 1);
    const __m512 now = _mm512_mask_roundscale_ps(old, changed, top, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    const __m512 kept = _mm512_mask_scalef_ps(one, changed, one, _mm512_sub_ps(old, now));
    const uint32_t some = _mm512_cmp_ps_mask(now, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ);
    alignas(64) float base[16];
    _mm512_store_ps(base, _mm512_maskz_mov_ps(some, now));  // 0 where no score has been above -inf
    store_lanes<N>(m + first, (vf)now);
    if (changed) store_lanes<N>(keep + first, (vf)kept);
    __m512i most = _mm512_setzero_si512();  // not asked for: m is right
    const vf sum = sums<N, PLAIN>(first, base, most);
    store_lanes<N>(l + first, (vf)_mm512_fmadd_ps((__m512)load_lanes<N>(l + first), kept, (__m512)sum));
    return changed;
  }

  // The probabilities of N lanes relative to 2^base [N], and their sums; `most`: the greatest so far.
  template <int N, bool PLAIN> HEADRACE_ALWAYS_INLINE vf sums(int first, const float *base, __m512i &most) const {
    constexpr int QUADS = N < 4 ? 1 : N / 4, LANES_EACH = N < 4 ? 1 : 4;
    __m512 fours[QUADS];
    each<QUADS>([&](auto j) HEADRACE_ALWAYS_INLINE {
      __m512 sum[LANES_EACH];
      each<LANES_EACH>([&](auto b) HEADRACE_ALWAYS_INLINE {
        sum[b] = this->row<PLAIN>(first + j + b * QUADS, _mm512_set1_ps(base[j + b * QUADS]), most);
      });
      fours[j] = to_fours<LANES_EACH>(sum, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; });
    });
    return from_fours(fours, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; });
  }

  // The probabilities of one lane relative to 2^base; `most`: the greatest so far. Returns their sums of four.
  template <bool PLAIN> HEADRACE_ALWAYS_INLINE __m512 row(int lane, __m512 base, __m512i &most) const {
    const float *from = s + lane * CHUNK;
    __m512 x[4];
    for (int64_t i = lane * fetch.near_each; i < (lane + 1) * fetch.near_each; ++i) fetch_lines<1>(fetch.near + i * LINE);
    for (int64_t i = lane * fetch.far_each; i < (lane + 1) * fetch.far_each; ++i) {
      const int64_t line = fetch.gaps ? i / 8 * 32 + 24 + i % 8 : i;
      fetch_lines<1, TO_L2>(fetch.far[0] + line * LINE);
      fetch_lines<1, TO_L2>(fetch.far[1] + line * LINE);
    }
    each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
      x[c] = power(_mm512_mul_ps(_mm512_load_ps(from + c * 16), factor), base);
    });
    if (!PLAIN) keep_seen(seen.mask(lane), x);
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), x[2]), x[3]);
    if (!PLAIN && weights) weigh(seen.mask(lane), weights, x);
    const __m512bh low = _mm512_cvtne2ps_pbh(x[1], x[0]), high = _mm512_cvtne2ps_pbh(x[3], x[2]);
    _mm512_store_si512(p + lane * CHUNK, (__m512i)low);
    _mm512_store_si512(p + lane * CHUNK + 32, (__m512i)high);
    most = _mm512_max_epu16(most, _mm512_max_epu16((__m512i)low, (__m512i)high));
    if (PLAIN || weights || !seen.only_key(lane)) return sum;
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    return _mm512_dpbf16_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), low, ones), high, ones);
  }

  // -inf for the keys that are not in `mask`.
  static void hide(float *s, uint64_t mask) {
    const __m512 low = _mm512_set1_ps(-__builtin_inff());
    for (int c = 0; c < 4; ++c)
      _mm512_store_ps(s + c * 16, _mm512_mask_mov_ps(low, mask >> (16 * c), _mm512_load_ps(s + c * 16)));
  }

  // x, 0 for the keys that are not in `mask`.
  static HEADRACE_ALWAYS_INLINE void keep_seen(uint64_t mask, __m512 (&x)[4]) {
    each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
      x[c] = _mm512_maskz_mov_ps(static_cast<__mmask16>(mask >> (16 * c)), x[c]);
    });
  }

  // x times the weights of the keys in `mask`; the others' may be garbage.
  static void weigh(uint64_t mask, const float *weights, __m512 (&x)[4]) {
    each<4>([&](auto c) HEADRACE_ALWAYS_INLINE {
      x[c] = _mm512_maskz_mul_ps(mask >> (16 * c), x[c], _mm512_loadu_ps(weights + c * 16));
    });
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
