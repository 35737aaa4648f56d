// Says, while the kernels are being configured, which instruction set is the fastest here.
#include <cstdio>

#include "features.h"

int main() {
  const char *best = "portable";
#ifdef __x86_64__
  if (headrace::has_avx2()) best = "avx2";
  if (headrace::has_avx512()) best = "avx512";
  if (headrace::has_avx512bf16()) best = "avx512bf16";
#ifdef HEADRACE_KNOWS_AMX
  if (headrace::has_amx()) best = "amx";
#endif
#endif
  puts(best);
}
