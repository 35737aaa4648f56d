#include "isa/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#ifdef __linux__
#include <unistd.h>
#endif

#include "isa/features.h"

namespace headrace {
namespace {

struct Isa {
  const char *name;
  const Kernels *kernels;
  bool (*runs)();
};

// Those that were built: HEADRACE_ISA_BUILD says which.
const Isa ISAS[] = {
#ifdef HEADRACE_HAS_portable
    {"portable", &portable::kernels, always},
#endif
#ifdef HEADRACE_HAS_avx2
    {"avx2", &avx2::kernels, has_avx2},
#endif
#ifdef HEADRACE_HAS_avx512
    {"avx512", &avx512::kernels, has_avx512},
#endif
#ifdef HEADRACE_HAS_avx512bf16
    {"avx512bf16", &avx512bf16::kernels, has_avx512bf16},
#endif
#ifdef HEADRACE_HAS_amx
    {"amx", &amx::kernels, has_amx},
#endif
};

template <typename F> std::string names_of(F wanted) {
  std::string all;
  for (const Isa &isa : ISAS)
    if (wanted(isa)) all += (all.empty() ? "" : ", ") + std::string(isa.name);
  return all;
}

const Isa *find(const char *name) {
  for (const Isa &isa : ISAS)
    if (isa.runs() && !strcmp(isa.name, name)) return &isa;
  throw std::invalid_argument(std::string("HEADRACE_ISA: '") + name +
                              "' is not available here; available: " + available_isas());
}

const Isa *fastest() {
  const Isa *best = nullptr;
  for (const Isa &isa : ISAS)
    if (isa.runs()) best = &isa;
  if (!best) throw std::invalid_argument(std::string("the kernels were built for ") + built_isas() + ", which cannot run here");
  return best;
}

std::atomic<const Isa *> chosen{nullptr};

constexpr int SMALL_L1 = 32;  // KB

// Of the first data cache; 0 where the system does not tell.
int l1_kilobytes() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  return static_cast<int>(sysconf(_SC_LEVEL1_DCACHE_SIZE) / 1024);
#else
  return 0;
#endif
}

bool is_small(int kilobytes) { return 0 < kilobytes && kilobytes <= SMALL_L1; }

const Isa &choice() {
  if (!chosen) {
    const char *forced = getenv("HEADRACE_ISA");
    chosen = forced && *forced ? find(forced) : fastest();
  }
  return *chosen;
}

}  // namespace

#ifdef __x86_64__
const bool multiplies_bf16 = has_avx512bf16();
#else
const bool multiplies_bf16 = false;
#endif
bool small_l1 = is_small(l1_kilobytes());

const char *available_isas() {
  static const std::string names = names_of([](const Isa &isa) { return isa.runs(); });
  return names.c_str();
}

const char *built_isas() {
  static const std::string names = names_of([](const Isa &) { return true; });
  return names.c_str();
}

const Kernels &kernels() { return *choice().kernels; }
const char *isa() { return choice().name; }
void use_isa(const char *name) { chosen = find(name); }
void use_l1(int kilobytes) { small_l1 = is_small(kilobytes ? kilobytes : l1_kilobytes()); }

}  // namespace headrace
