// Which instruction sets this processor, and the system on it, can run: has_NAME for each of HEADRACE_ISAS. What a set asks is
// all that isas.cmake compiles it with.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace headrace {

inline bool has_portable() { return true; }

#ifdef __x86_64__
#define HEADRACE_HAS(feature) (__builtin_cpu_supports(feature) != 0)
#else
#define HEADRACE_HAS(feature) false
#endif

// GCC 10 does not know the name.
inline bool has_f16c() {
#ifdef __x86_64__
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
#else
  return false;
#endif
}

inline bool has_avx2() { return HEADRACE_HAS("avx2") && HEADRACE_HAS("fma") && has_f16c(); }
inline bool has_avx512() {
  return has_avx2() && HEADRACE_HAS("avx512f") && HEADRACE_HAS("avx512bw") && HEADRACE_HAS("avx512vl") &&
         HEADRACE_HAS("avx512dq");
}
inline bool has_avx512bf16() { return has_avx512() && HEADRACE_HAS("avx512bf16") && HEADRACE_HAS("avx512vnni"); }

// Tiles are 8 KB more to save for each thread: Linux gives them to processes that ask (once, for all their threads).
inline bool has_amx() {
#if HEADRACE_KNOWS_AMX + 0 && defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  static const bool given = HEADRACE_HAS("amx-tile") && HEADRACE_HAS("amx-bf16") && HEADRACE_HAS("amx-int8") &&
                            syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  return given && has_avx512bf16();
#else
  return false;
#endif
}

// Products of four bytes in one instruction (sdot), which the portable set asks for as it runs: it is compiled for all of ARM.
inline bool has_dot_products() {
#if defined(__ARM_FEATURE_DOTPROD)
  return true;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long ASIMDDP = 1 << 20;  // HWCAP_ASIMDDP, which old headers do not have
  return (getauxval(AT_HWCAP) & ASIMDDP) != 0;
#else
  return false;
#endif
}

}  // namespace headrace
