// Quantised weights as pairs of bf16, in registers of AVX-512. Codes are whole numbers up to 128: exact in bf16.
//
// A form of weights has BYTES for each pair of inputs of 64 outputs, which decode() turns into out[4][16 outputs][2]. FILLS_L1:
// rows meet a block of them in L1, which has no room for more where it is small.
#pragma once

#ifdef __AVX512BF16__

#include "isa/pairs.h"

namespace headrace::HEADRACE_NS {

struct Int8 {
  static constexpr int64_t BYTES = 128;  // of a pair
  static constexpr bool SCALED = false;  // group by group
  static constexpr bool FILLS_L1 = false;

  // A code's fp32 has nothing in its lower half: the pair is two upper halves.
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    for (int c = 0; c < 4; ++c)
      out[c] = (__m512bh)_mm512_or_si512(_mm512_srli_epi32(wide(w + c * 32), 16), wide(w + c * 32 + 16));
  }

  HEADRACE_INLINE __m512i wide(const byte *w) {
    const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w)));
    return (__m512i)_mm512_cvtepi32_ps(codes);
  }
};

struct Int4 {
  static constexpr int64_t BYTES = 64;
  static constexpr bool SCALED = true, FILLS_L1 = false;

  // A permutation looks at five bits, so the sixteen values stand twice in the table: no bit need be masked off.
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    alignas(64) static constexpr bf16 VALUES[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i values = _mm512_load_si512(VALUES), words = _mm512_loadu_si512(w);
    out[0] = (__m512bh)_mm512_permutexvar_epi16(words, values);
    out[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), values);
    out[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), values);
    out[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), values);
  }
};

struct Decoded {
  static constexpr int64_t BYTES = 256;
  static constexpr bool FILLS_L1 = true;

  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    for (int c = 0; c < 4; ++c) out[c] = (__m512bh)_mm512_loadu_si512(w + c * 64);
  }
};

// `pairs` pairs decoded, fetching meanwhile the codes AHEAD bytes on, if any.
template <typename Form, int64_t AHEAD = 0>
HEADRACE_APART void decode_block(const byte *codes, int64_t pairs, byte *decoded) {
#pragma GCC unroll 1
  for (int64_t i = 0; i < pairs; ++i, codes += Form::BYTES) {
    if constexpr (AHEAD > 0) fetch_twice<Form::BYTES / 64>(codes + AHEAD);
    __m512bh weight[4];
    Form::decode(codes, weight);
    for (int c = 0; c < 4; ++c) _mm512_store_si512(decoded + i * Decoded::BYTES + c * 64, (__m512i)weight[c]);
  }
}

}  // namespace headrace::HEADRACE_NS

#endif
