// The formats of quantised weights. Codes are whole numbers up to 128: exact in bf16. How they lie: linear_quant.cpp.
//
// A format has BYTES for each pair of inputs of 64 outputs; a Reader (a policy of passes.h) for any instruction set; and where
// pairs of bf16 are multiplied, decode(), which turns them into out[4][16 outputs][2] in registers of AVX-512. GROUPED: scales
// are bf16, one for 64 inputs, else fp32, one for each output. FILLS_L1: rows meet a block of them in L1, which has no room for
// more where it is small.
#pragma once

#include "isa/pairs.h"
#include "linear/passes.h"

namespace headrace::HEADRACE_NS {

struct Int8 {
  static constexpr int64_t BYTES = 128;
  static constexpr bool GROUPED = false, FILLS_L1 = false;

  struct Reader {
    static constexpr int BYTES = COLUMNS, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr bool CHEAP = false;
    using Same = float;
    const byte *codes;  // from an even input on

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * 64 + odd * 16;
      HEADRACE_EACH(c, C, {
        const int64_t at = column + c * W;
        x[c] = HEADRACE_NS::load(reinterpret_cast<const int8_t *>(from + at / 16 * 32 + at % 16));
      });
    }
  };

#ifdef __AVX512BF16__
  // A code's fp32 has nothing in its lower half: the pair is two upper halves.
  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    for (int c = 0; c < 4; ++c)
      out[c] = (__m512bh)_mm512_or_si512(_mm512_srli_epi32(wide(w + c * 32), 16), wide(w + c * 32 + 16));
  }

  HEADRACE_INLINE __m512i wide(const byte *w) {
    const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w)));
    return (__m512i)_mm512_cvtepi32_ps(codes);
  }
#endif
};

struct Int4 {
  static constexpr int64_t BYTES = 64;
  static constexpr bool GROUPED = true, FILLS_L1 = false;

  struct Reader {
    static constexpr int BYTES = COLUMNS / 2, STEPS = 2, INPUTS = PASS_INPUTS;
    static constexpr bool CHEAP = false;
    using Same = float;
    const byte *codes;

    const char *memory() const { return reinterpret_cast<const char *>(codes); }

    template <int C> HEADRACE_ALWAYS_INLINE void load(int64_t input, int odd, int64_t column, vf (&x)[C]) const {
      const byte *from = codes + (input - odd) * 32;
      HEADRACE_EACH(c, C, {
        const int at = static_cast<int>(column) + c * W;
        vu words;
        memcpy(&words, from + at % 16 * 4, sizeof words);
        x[c] = values(words, 16 * odd + at / 16 * 4);
      });
    }

    // q of the four bits of each word, which are q + 8, from bit `at` on.
    HEADRACE_ALWAYS_INLINE static vf values(vu words, int at) {
#if defined(__AVX512F__)
      const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
      return reinterpret_cast<vf>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(words >> at), table));
#else
      return __builtin_convertvector(reinterpret_cast<vi>((words ^ 0x88888888u) << (28 - at)) >> 28, vf);
#endif
    }
  };

#ifdef __AVX512BF16__
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
#endif
};

// f(LinearOf<the format of a's weights>).
template <typename F> void with_format(const LinearQuant &a, F f) {
  switch (a.form) {
    case Form::int8: return f(LinearOf<Int8>{a});
    case Form::int4: return f(LinearOf<Int4>{a});
    default: break;  // no codes
  }
}

#ifdef __AVX512BF16__

struct Decoded {
  static constexpr int64_t BYTES = 256;
  static constexpr bool FILLS_L1 = true;

  HEADRACE_INLINE void decode(const byte *w, __m512bh (&out)[4]) {
    for (int c = 0; c < 4; ++c) out[c] = (__m512bh)_mm512_loadu_si512(w + c * 64);
  }
};

// `pairs` pairs decoded, fetching meanwhile the codes AHEAD bytes on, if any.
template <typename Codes, int64_t AHEAD = 0>
HEADRACE_APART void decode_block(const byte *codes, int64_t pairs, byte *decoded) {
#pragma GCC unroll 1
  for (int64_t i = 0; i < pairs; ++i, codes += Codes::BYTES) {
    if constexpr (AHEAD > 0) fetch_twice<Codes::BYTES / 64>(codes + AHEAD);
    __m512bh weight[4];
    Codes::decode(codes, weight);
    for (int c = 0; c < 4; ++c) _mm512_store_si512(decoded + i * Decoded::BYTES + c * 64, (__m512i)weight[c]);
  }
}

#endif

}  // namespace headrace::HEADRACE_NS
