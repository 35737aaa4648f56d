// Codes as AVX2 reads them: those of eight outputs, two inputs and four lots of 16 outputs side by side, in the bytes of eight
// lanes, so that one operation serves 32 of them. (AVX-512 looks each up in one step: few_bits.h.)
//
// A lane holds an output l of 16; a pair's codes of output 16 c + l and input p are in byte 2 p + c / 2 of it: those of an even c
// in `even`, of an odd one in `odd`. Vectors of numbers are counted in that order: v = 0, 1, 2, 3 for c = 0, 2, 1, 3. How codes lie
// in memory: few_bits.h, linear_quant.cpp.
#pragma once

#include "isa/simd.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

#define HEADRACE_BYTE_LANES

namespace headrace::HEADRACE_NS {

// Where the outputs of vector v of a half of 64 begin.
HEADRACE_INLINE int64_t lane_column(int half, int v) { return 16 * (v % 2 * 2 + v / 2) + 8 * half; }

struct LaneBytes {
  vu even, odd;
};

HEADRACE_INLINE __m256i as_bytes(vu x) { return (__m256i)x; }

// Four bits each, of words of 16 bits [16 outputs][2 inputs]: those of eight outputs.
HEADRACE_INLINE LaneBytes nibbles(const byte *words) {
  vu w;
  memcpy(&w, words, sizeof w);
  return {w & 0x0f0f0f0fu, w >> 4 & 0x0f0f0f0fu};
}

// Two bits each, of bytes [16 outputs][2 inputs].
HEADRACE_INLINE LaneBytes two_bits(const byte *pairs) {
  const vu w = (vu)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(pairs)));
  const vu apart = w | w << 4;  // bits 0 to 3 of the lower byte, then of the upper one
  return {apart & 0x03030303u, apart >> 2 & 0x03030303u};
}

// One bit each, set or not as a whole byte, of words of 32 bits [4], those of 16 outputs by two inputs: of eight outputs from
// 8 * half on.
HEADRACE_INLINE LaneBytes one_bit(const byte *words, int half) {
  // The byte of word 0 and 2 in which an output's two bits are, and which they are in it.
  alignas(32) static constexpr byte WHERE[32] = {0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8,
                                                 1, 9, 1, 9, 1, 9, 1, 9, 1, 9, 1, 9, 1, 9, 1, 9};
  alignas(32) static constexpr byte WHICH[32] = {1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64, 128, 128,
                                                 1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64, 128, 128};
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(words)));
  const __m256i where = _mm256_load_si256(reinterpret_cast<const __m256i *>(WHERE));
  const __m256i which = _mm256_load_si256(reinterpret_cast<const __m256i *>(WHICH));
  const auto set = [&](int first) HEADRACE_ALWAYS_INLINE {
    const __m256i bits = _mm256_shuffle_epi8(all, _mm256_add_epi8(where, _mm256_set1_epi8(static_cast<char>(first))));
    return (vu)_mm256_cmpeq_epi8(_mm256_and_si256(bits, which), which);
  };
  return {set(2 * half), set(2 * half + 4)};
}

// Byte AT of each lane.
template <int AT> HEADRACE_INLINE vi byte_of(vu lanes) {
  if constexpr (AT == 0) return (vi)(lanes & 0xffu);
  else if constexpr (AT == 3) return (vi)(lanes >> 24);
  else {
    alignas(32) static constexpr uint32_t PLACES[8] = {0x80808000u + AT, 0x80808004u + AT, 0x80808008u + AT, 0x8080800cu + AT,
                                                       0x80808000u + AT, 0x80808004u + AT, 0x80808008u + AT, 0x8080800cu + AT};
    return (vi)_mm256_shuffle_epi8(as_bytes(lanes), _mm256_load_si256(reinterpret_cast<const __m256i *>(PLACES)));
  }
}

// f(v, p, numbers): whole numbers, their codes less LEAST.
template <int LEAST, typename F> HEADRACE_ALWAYS_INLINE inline void each_whole(LaneBytes codes, F f) {
  each<2>([&](auto p) HEADRACE_ALWAYS_INLINE {
    each<4>([&](auto v) HEADRACE_ALWAYS_INLINE {
      const vi code = byte_of<2 * p + v % 2>(v < 2 ? codes.even : codes.odd);
      f(v, p, __builtin_convertvector(LEAST ? code - LEAST : code, vf));
    });
  });
}

// Words of 16 bits from the bytes of two lots of codes each, lower and upper ones.
struct LaneWords {
  vu first, second;
};

HEADRACE_INLINE LaneWords words_of(__m256i lower, __m256i upper) {
  const vu low = (vu)lower, high = (vu)upper;
  return {(low & 0x00ff00ffu) | (vu)_mm256_slli_epi16(upper, 8), (vu)_mm256_srli_epi16(lower, 8) | (high & 0xff00ff00u)};
}

// The two numbers of bf16 in each lane.
template <typename F> HEADRACE_ALWAYS_INLINE inline void each_half(vu words, F f) {
  f(Constant<0>{}, reinterpret_cast<vf>(words << 16));
  f(Constant<1>{}, reinterpret_cast<vf>(words & 0xffff0000u));
}

// 16 numbers of bf16, lower and upper bytes apart.
class ByteTable {
 public:
  explicit ByteTable(const bf16 *values) {
    const __m128i *all = reinterpret_cast<const __m128i *>(values);
    const __m128i first = _mm_loadu_si128(all), second = _mm_loadu_si128(all + 1), low = _mm_set1_epi16(0xff);
    lower = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(first, low), _mm_and_si128(second, low)));
    upper = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
  }

  // f(v, p, numbers) that codes stand for.
  template <typename F> HEADRACE_ALWAYS_INLINE void each_number(LaneBytes codes, F f) const {
    each<2>([&](auto odd) HEADRACE_ALWAYS_INLINE {
      const __m256i index = as_bytes(odd ? codes.odd : codes.even);
      const LaneWords words = words_of(_mm256_shuffle_epi8(lower, index), _mm256_shuffle_epi8(upper, index));
      each_half(words.first, [&](auto p, vf x) HEADRACE_ALWAYS_INLINE { f(Constant<2 * odd>{}, p, x); });
      each_half(words.second, [&](auto p, vf x) HEADRACE_ALWAYS_INLINE { f(Constant<2 * odd + 1>{}, p, x); });
    });
  }

 private:
  __m256i lower, upper;
};

// f(i, p, numbers) of 16 outputs by two inputs [16][2] in E4M3, eight outputs from 8 i on. The upper four bits of a code say the
// upper byte of a bf16, the lower four the lower one; where the exponent is 0 or 1, the lower four say both, all but the sign.
template <typename F> HEADRACE_ALWAYS_INLINE inline void each_small(const byte *pairs, F f) {
  alignas(16) static constexpr byte UPPER[16] = {0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43,
                                                 0xbc, 0xbd, 0xbe, 0xbf, 0xc0, 0xc1, 0xc2, 0xc3};
  alignas(16) static constexpr byte UPPER_OF_LEAST[16] = {0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c,
                                                          0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
  alignas(16) static constexpr byte LOWER_OF_LEAST[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60,
                                                          0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
  const auto looked_up = [](const byte *table, __m256i index) HEADRACE_ALWAYS_INLINE {
    const __m128i numbers = _mm_load_si128(reinterpret_cast<const __m128i *>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), index);
  };
  constexpr int SO_THAT_HALVES_MEET = 0xd8;  // quarters 0, 2, 1, 3: interleaving goes by halves
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(pairs));
  const vu codes = (vu)_mm256_permute4x64_epi64(all, SO_THAT_HALVES_MEET);
  const __m256i low = as_bytes(codes & 0x0f0f0f0fu), high = as_bytes(codes >> 4 & 0x0f0f0f0fu);
  const __m256i least = _mm256_cmpeq_epi8(as_bytes(codes & 0x70707070u), _mm256_setzero_si256());
  const __m256i small = _mm256_or_si256(looked_up(UPPER_OF_LEAST, low), as_bytes(codes & 0x80808080u));
  const __m256i upper = _mm256_blendv_epi8(looked_up(UPPER, high), small, least);
  const __m256i lower = _mm256_blendv_epi8(_mm256_slli_epi16(low, 4), looked_up(LOWER_OF_LEAST, low), least);
  each_half((vu)_mm256_unpacklo_epi8(lower, upper), [&](auto p, vf x) HEADRACE_ALWAYS_INLINE { f(Constant<0>{}, p, x); });
  each_half((vu)_mm256_unpackhi_epi8(lower, upper), [&](auto p, vf x) HEADRACE_ALWAYS_INLINE { f(Constant<1>{}, p, x); });
}

}  // namespace headrace::HEADRACE_NS

#endif
