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
  bool (*has)();

  bool built() const { return kernels; }  // HEADRACE_ISA_BUILD says which
  bool runs() const { return built() && has(); }
};

#define HEADRACE_ENTRY(name) {#name, &name::kernels, has_##name},
const Isa ISAS[] = {HEADRACE_ISAS(HEADRACE_ENTRY)};
#undef HEADRACE_ENTRY

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

const bool multiplies_bf16 = has_avx512bf16();
bool small_l1 = is_small(l1_kilobytes());

const char *available_isas() {
  static const std::string names = names_of([](const Isa &isa) { return isa.runs(); });
  return names.c_str();
}

const char *built_isas() {
  static const std::string names = names_of([](const Isa &isa) { return isa.built(); });
  return names.c_str();
}

const Kernels &kernels() { return *choice().kernels; }
const char *isa() { return choice().name; }
void use_isa(const char *name) { chosen = find(name); }
void use_l1(int kilobytes) { small_l1 = is_small(kilobytes ? kilobytes : l1_kilobytes()); }

}  // namespace headrace
