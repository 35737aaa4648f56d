// The numbers that codes of three and four bits stand for.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

// What codes stand for, in bf16: of four bits,
struct Signed {
  static constexpr bf16 VALUES[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
};

struct Unsigned {
  static constexpr bf16 VALUES[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                      0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
};

// or any numbers, those of three bits twice.
struct Table {
  const bf16 *VALUES;
};

inline Table table_of(Form form) {
  // 2 bits of exponent, 1 of mantissa (OCP Microscaling Formats).
  static constexpr bf16 E2M1[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  // -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
  static constexpr bf16 IQ4[16] = {0xc2fe, 0xc2d0, 0xc2a6, 0xc282, 0xc244, 0xc20c, 0xc1b0, 0xc120,
                                   0x3f80, 0x4150, 0x41c8, 0x4218, 0x4254, 0x428a, 0x42b2, 0x42e2};
  // 1, 3, 5, 7, 9, 11, 13, 15 and below zero; the last of them half more
  static constexpr bf16 IQ3_S[16] = {0x3f80, 0x4040, 0x40a0, 0x40e0, 0x4110, 0x4130, 0x4150, 0x4170,
                                     0xbf80, 0xc040, 0xc0a0, 0xc0e0, 0xc110, 0xc130, 0xc150, 0xc170};
  static constexpr bf16 IQ3_XXS[16] = {0x3f80, 0x4040, 0x40a0, 0x40e0, 0x4110, 0x4130, 0x4150, 0x4178,
                                       0xbf80, 0xc040, 0xc0a0, 0xc0e0, 0xc110, 0xc130, 0xc150, 0xc178};
  static constexpr bf16 INT3[16] = {0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040,
                                    0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040};
  // 1, 3.125, 5.375, none, and below zero
  static constexpr bf16 IQ2[16] = {0x3f80, 0x4048, 0x40ac, 0x0000, 0xbf80, 0xc048, 0xc0ac, 0x0000,
                                   0x3f80, 0x4048, 0x40ac, 0x0000, 0xbf80, 0xc048, 0xc0ac, 0x0000};
  // -1, 0, 1 less an eighth, none, and an eighth more
  static constexpr bf16 IQ1[16] = {0xbf90, 0xbe00, 0x3f60, 0x0000, 0xbf60, 0x3e00, 0x3f90, 0x0000,
                                   0xbf90, 0xbe00, 0x3f60, 0x0000, 0xbf60, 0x3e00, 0x3f90, 0x0000};
  // Quantiles of a normal distribution, 0 and 1 among them (QLoRA, arXiv 2305.14314), rounded to bf16
  static constexpr bf16 NF4[16] = {0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
                                   0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};
  switch (form) {
    case Form::iq4: return {IQ4};
    case Form::iq3_s: return {IQ3_S};
    case Form::iq3_xxs: return {IQ3_XXS};
    case Form::int3: return {INT3};
    case Form::iq2: return {IQ2};
    case Form::iq1: return {IQ1};
    case Form::nf4: return {NF4};
    default: return {E2M1};
  }
}

// The numbers of codes of four bits; AVX-512 looks at no others.
HEADRACE_INLINE vf looked_up(vu codes, const bf16 *values) {
#if defined(__AVX512F__)
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values)), 16);
  return reinterpret_cast<vf>(_mm512_permutexvar_epi32(reinterpret_cast<__m512i>(codes), upper));
#elif defined(__AVX2__)
  const auto eight = [&](int from) HEADRACE_ALWAYS_INLINE {
    const __m256i upper = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(values + from)));
    return _mm256_permutevar8x32_ps((__m256)_mm256_slli_epi32(upper, 16), (__m256i)codes);
  };
  return (vf)_mm256_blendv_ps(eight(0), eight(8), (__m256)(codes << 28));
#else
  vu upper;
  for (int lane = 0; lane < W; ++lane) upper[lane] = static_cast<uint32_t>(values[codes[lane]]) << 16;
  return reinterpret_cast<vf>(upper);
#endif
}

}  // namespace headrace::HEADRACE_NS
