// Says, while the kernels are being configured, which instruction sets run here, the fastest last.
#include <cstdio>

#include "isa/features.h"
#include "kernels.h"

int main() {
#define TELL(name) \
  if (headrace::has_##name()) puts(#name);
  HEADRACE_ISAS(TELL)
}
