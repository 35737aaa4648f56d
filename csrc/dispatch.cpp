#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace headrace {
namespace {

struct Isa {
  const char *name;
  const Kernels *kernels;
  bool (*runs)();
};

bool always() { return true; }

#ifdef HEADRACE_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

const Isa ISAS[] = {
    {"portable", &portable::kernels, always},
#ifdef HEADRACE_X86
    {"avx2", &avx2::kernels, has_avx2},
    {"avx512", &avx512::kernels, has_avx512},
    {"avx512bf16", &avx512bf16::kernels, has_avx512bf16},
#endif
};

const Isa *find(const char *name) {
  for (const Isa &isa : ISAS)
    if (isa.runs() && !strcmp(isa.name, name)) return &isa;
  throw std::invalid_argument(std::string("HEADRACE_ISA: '") + name + "' is not available here; available: " +
                              available_isas());
}

const Isa *fastest() {
  const Isa *best = nullptr;
  for (const Isa &isa : ISAS)
    if (isa.runs()) best = &isa;
  return best;
}

std::atomic<const Isa *> chosen{nullptr};

const Isa &choice() {
  if (!chosen) {
    const char *forced = getenv("HEADRACE_ISA");
    chosen = forced && *forced ? find(forced) : fastest();
  }
  return *chosen;
}

}  // namespace

const char *available_isas() {
  static const std::string names = [] {
    std::string all;
    for (const Isa &isa : ISAS)
      if (isa.runs()) all += (all.empty() ? "" : ", ") + std::string(isa.name);
    return all;
  }();
  return names.c_str();
}

const Kernels &kernels() { return *choice().kernels; }
const char *isa() { return choice().name; }
void use_isa(const char *name) { chosen = find(name); }

}  // namespace headrace
