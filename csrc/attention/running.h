// Probabilities whose reference a lane keeps as long as it can, so that the sums of several chunks are added up as they are.
//
// A lane's reference is 2^m, m a whole number: it rises, to the least not below the greatest score (in units of log 2), only
// when the probabilities of a chunk would sum to MOST or more. So no probability is above MOST, and sums are multiplied seldom,
// and then by powers of two: they are the same numbers, scaled, as with any other reference.
#pragma once

#include "attention/lanes.h"
#include "isa/pairs.h"

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

// Results below 1e-38 are 0 in this scope, and take no longer than others; or (FLUSH false) they are what they are, whatever
// the caller has set. Not around single groups of lanes: to change the mode, the processor finishes all that it has begun.
template <bool FLUSH> class Tiny {
  static constexpr unsigned MODE = _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
  const unsigned before = _mm_getcsr();

 public:
  Tiny() { _mm_setcsr((before & ~MODE) | (FLUSH ? _MM_FLUSH_ZERO_ON : 0)); }
  ~Tiny() { _mm_setcsr(before); }
};

// What is fetched while a group of lanes takes its probabilities: so many cache lines of `near` for each lane to L1, of both
// `far` to L2.
struct Fetch {
  const bf16 *near, *far[2];
  int64_t near_each, far_each;
  bool gaps;

  // The turn of `n` lanes from `lane` on.
  HEADRACE_ALWAYS_INLINE void turn(int64_t lane, int64_t n) const {
    const bf16 *line = near + lane * near_each * LINE, *end = line + n * near_each * LINE;
    for (; line < end; line += LINE) fetch_lines<1>(line);
    for (int64_t i = lane * far_each; i < (lane + n) * far_each; ++i) {
      const int64_t at = (gaps ? i / 8 * 32 + 24 + i % 8 : i) * LINE;
      fetch_lines<1, TO_L2>(far[0] + at);
      fetch_lines<1, TO_L2>(far[1] + at);
    }
  }
};

// Raw scores s [n, 64] -> probabilities p [n, 64] relative to 2^m, rounded to bf16, 0 where the lane sees nothing. m [n] is
// -inf at first. l [n] grows by the sum of the unrounded ones; a key that is the only one its row ever sees has the weight 1,
// so there by the rounded one. Where a lane's m rises, l and later its sums are multiplied by keep [n]. `weights` [64], or
// null, is what probabilities are multiplied by before they are rounded, but not in the sum.
struct RunningSoftmax {
  static constexpr float MOST = 0x1p8f;
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
    return seen.everything && !weights ? lanes<true>(n) : lanes<false>(n);
  }

 private:
  // Scores relative to m are counted from ORIGIN: from 32 below m to 32 above they lie between 64 and 128, where every number
  // is a multiple of 2^-17. So multiplying, shifting and rounding to such multiples are one multiply-add, and the part behind
  // the point is the same relative to any m. (ORIGIN - m is exact while m is less than 2^29, half a billion.)
  static constexpr float ORIGIN = 96.0f, UNIT = 0x1p-96f;

  // 2^(t - ORIGIN), at most 3e-6 of it from the truth, to which rounding t has added as much. Its digits are those of 2^r, r
  // the part of t behind the point.
  static HEADRACE_ALWAYS_INLINE __m512 power(__m512 t) {
    const __m512 r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 for -inf
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.34251544e-2f * UNIT), r, _mm512_set1_ps(5.22453740e-2f * UNIT));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.41278556e-1f * UNIT));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.93045155e-1f * UNIT));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(UNIT));
    return _mm512_scalef_ps(y, t);  // by 2 to the whole number below t
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

  template <int N, bool PLAIN> uint32_t some(int first) const {
    const uint32_t rising = steady<N, PLAIN>(first);
    return rising ? raised<N>(first, rising) : 0;
  }

  // N lanes that keep their m, if none of them must not: returns which must not, as bits, and if there are any, p is to be done
  // again. Their sums are MOST or more, or no numbers, as where there is no m yet.
  template <int N, bool PLAIN> HEADRACE_APART uint32_t steady(int first) const {
    const vf sum = sums<N, PLAIN>(first, load_lanes<N>(m + first));
    const uint32_t rising = _mm512_cmp_ps_mask((__m512)sum, _mm512_set1_ps(MOST), _CMP_NLT_UQ) & ((1u << N) - 1);
    if (!rising) store_lanes<N>(l + first, load_lanes<N>(l + first) + sum);
    return rising;
  }

  // N lanes from `first` on, those in `rising` with a new m if they have a score above the old one; returns which.
  // Lanes first + j + b N/4 go together through the first steps.
  template <int N> HEADRACE_APART uint32_t raised(int first, uint32_t rising) const {
    constexpr int QUADS = N < 4 ? 1 : N / 4, LANES_EACH = N < 4 ? 1 : 4;
    __m512 fours[QUADS];
    HEADRACE_EACH(j, QUADS, {
      __m512 top[LANES_EACH];
      HEADRACE_EACH(b, LANES_EACH, {
        const float *row = s + (first + j + b * QUADS) * CHUNK;
        top[b] = _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(row), _mm512_load_ps(row + 16)),
                               _mm512_max_ps(_mm512_load_ps(row + 32), _mm512_load_ps(row + 48)));
      });
      fours[j] = to_fours<LANES_EACH>(top, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return max(a, b); });
    });
    const vf greatest = from_fours(fours, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return max(a, b); });
    const __m512 top = _mm512_mul_ps((__m512)greatest, factor), one = _mm512_set1_ps(1.0f);
    const __m512 old = (__m512)load_lanes<N>(m + first);
    const uint32_t changed = rising & _mm512_cmp_ps_mask(top, old, _CMP_GT_OQ);
    const __m512 now = _mm512_mask_roundscale_ps(old, changed, top, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    const __m512 kept = _mm512_mask_scalef_ps(one, changed, one, _mm512_sub_ps(old, now));
    const uint32_t some = _mm512_cmp_ps_mask(now, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ);
    store_lanes<N>(m + first, (vf)now);
    if (changed) store_lanes<N>(keep + first, (vf)kept);
    const vf sum = sums<N, false>(first, (vf)_mm512_maskz_mov_ps(some, now));  // 0 where no score has been above -inf
    store_lanes<N>(l + first, (vf)_mm512_fmadd_ps((__m512)load_lanes<N>(l + first), kept, (__m512)sum));
    return changed;
  }

  // The probabilities of N lanes relative to 2^base, and their sums.
  template <int N, bool PLAIN> HEADRACE_ALWAYS_INLINE vf sums(int first, vf base) const {
    constexpr int QUADS = N < 4 ? 1 : N / 4, LANES_EACH = N < 4 ? 1 : 4;
    const float *from = s + first * CHUNK;  // copies: for all GCC knows, storing changes what `this` holds
    bf16 *to = p + first * CHUNK;
    const __m512 unit = factor;
    const Fetch ahead = fetch;
    alignas(64) float shift[16];
    store(shift, splat(ORIGIN) - base);            // infinite where there is no m yet: sums are no numbers below MOST
    if constexpr (N == 16) asm("" : "+m"(shift));  // so that it is read from memory: each lane's permutation would take longer
    __m512 fours[QUADS];
    HEADRACE_EACH(j, QUADS, {
      ahead.turn(first + j * LANES_EACH, LANES_EACH);
      __m512 sum[LANES_EACH];
      HEADRACE_EACH(b, LANES_EACH, {
        constexpr int r = j + b * QUADS;
        sum[b] = this->row<PLAIN>(first + r, from + r * CHUNK, unit, _mm512_set1_ps(shift[r]), to + r * CHUNK);
      });
      fours[j] = to_fours<LANES_EACH>(sum, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; });
    });
    return from_fours(fours, [](vf a, vf b) HEADRACE_ALWAYS_INLINE { return a + b; });
  }

  // The probabilities of one lane, of its scores times `unit` plus `shift`. Returns their sums of four.
  template <bool PLAIN>
  HEADRACE_ALWAYS_INLINE __m512 row(int lane, const float *from, __m512 unit, __m512 shift, bf16 *to) const {
    __m512 x[4];
    HEADRACE_EACH(c, 4, { x[c] = power(_mm512_fmadd_ps(_mm512_load_ps(from + c * 16), unit, shift)); });
    if constexpr (!PLAIN) keep_seen(seen.mask(lane), x);
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), x[2]), x[3]);
    if constexpr (!PLAIN)
      if (weights) weigh(seen.mask(lane), weights, x);
    const __m512bh low = _mm512_cvtne2ps_pbh(x[1], x[0]), high = _mm512_cvtne2ps_pbh(x[3], x[2]);
    _mm512_store_si512(to, (__m512i)low);
    _mm512_store_si512(to + 32, (__m512i)high);
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
    HEADRACE_EACH(c, 4, { x[c] = _mm512_maskz_mov_ps(static_cast<__mmask16>(mask >> (16 * c)), x[c]); });
  }

  // x times the weights of the keys in `mask`; the others' may be garbage.
  static void weigh(uint64_t mask, const float *weights, __m512 (&x)[4]) {
    HEADRACE_EACH(c, 4, { x[c] = _mm512_maskz_mul_ps(mask >> (16 * c), x[c], _mm512_loadu_ps(weights + c * 16)); });
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
