// Scratch memory of a thread: grows to the largest size asked for and stays, so that a call allocates nothing.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace headrace::HEADRACE_NS {

struct Arena {
  float *memory = nullptr;
  int64_t size = 0;

  ~Arena() { free(memory); }

  float *at_least(int64_t floats) {
#ifdef __SANITIZE_ADDRESS__
    size = 0;  // a block of just the size asked for, so that an overrun is seen
#endif
    if (floats <= size) return memory;
    free(memory);
    memory = static_cast<float *>(aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
    if (!memory) {  // inside a parallel region nothing can be thrown
      fputs("headrace: out of memory for kernel scratch\n", stderr);
      abort();
    }
    size = floats;
    return memory;
  }
};

static inline float *arena(int64_t floats) {
  static thread_local Arena mine;
  return mine.at_least(floats);
}

}  // namespace headrace::HEADRACE_NS
