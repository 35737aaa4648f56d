#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#ifdef __linux__
#include <unistd.h>
#endif
#if defined(HEADRACE_AMX) && defined(__linux__)
#include <sys/syscall.h>
#endif

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

#ifdef HEADRACE_AMX
// Tiles are 8 KB more to save for each thread: Linux gives them to processes that ask (once, for all their threads).
bool has_amx() {
#ifdef __linux__
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  static const bool given = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                            syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  return given && has_avx512bf16();
#else
  return false;
#endif
}
#endif

const Isa ISAS[] = {
    {"portable", &portable::kernels, always},
#ifdef HEADRACE_X86
    {"avx2", &avx2::kernels, has_avx2},
    {"avx512", &avx512::kernels, has_avx512},
    {"avx512bf16", &avx512bf16::kernels, has_avx512bf16},
#endif
#ifdef HEADRACE_AMX
    {"amx", &amx::kernels, has_amx},
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

bool small_l1 = is_small(l1_kilobytes());

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
void use_l1(int kilobytes) { small_l1 = is_small(kilobytes ? kilobytes : l1_kilobytes()); }

}  // namespace headrace
