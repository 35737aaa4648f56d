// Says, while the kernels are being configured, which instruction set is the fastest here.
#include <cstdio>

#include "isa/features.h"
#include "kernels.h"

int main() {
  const char *best = "portable";
#define CHOOSE(name) \
  if (headrace::has_##name()) best = #name;
  HEADRACE_ISAS(CHOOSE)
  puts(best);
}
