// Scratch memory of a thread, handed out in typed pieces. Under the address sanitizer what lies between two pieces is poisoned.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1  // as GCC has it
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(memory, bytes)
#endif

namespace headrace::HEADRACE_NS {

#ifdef __SANITIZE_ADDRESS__
constexpr int64_t RED_ZONE = 64;
#else
constexpr int64_t RED_ZONE = 0;
#endif

// Bytes that a piece of n elements takes: whole cache lines.
template <typename T> constexpr int64_t room(int64_t n) {
  return (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64 + RED_ZONE;
}

// Memory from which pieces are taken, one behind the other; a copy takes the same ones again.
class Scratch {
 public:
  explicit Scratch(void *memory) : next(static_cast<char *>(memory)) {}

  // n elements, not initialised. The sum of all pieces' rooms is what the memory must have.
  template <typename T> T *take(int64_t n) {
    T *piece = reinterpret_cast<T *>(next);
    ASAN_UNPOISON_MEMORY_REGION(piece, n * sizeof(T));
    next += room<T>(n);
    return piece;
  }

 private:
  char *next;
};

// Grows to the largest size asked for and stays, so that a call allocates nothing.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena &) = delete;
  ~Arena() { free(memory); }

  Scratch at_least(int64_t bytes) {
    if (bytes > size ||
        RED_ZONE) {  // with a sanitizer just the size asked for, so that overruns of the last piece are seen too
      free(memory);
      memory = aligned_alloc(64, bytes);
      if (!memory) {  // inside a parallel region nothing can be thrown
        fputs("headrace: out of memory for kernel scratch\n", stderr);
        abort();
      }
      size = bytes;
    }
    ASAN_POISON_MEMORY_REGION(memory, bytes);
    return Scratch(memory);
  }

 private:
  void *memory = nullptr;
  int64_t size = 0;
};

// The calling thread's. What was taken from it before is lost.
static inline Scratch arena(int64_t bytes) {
  static thread_local Arena mine;
  return mine.at_least(bytes);
}

// Room on the stack for N objects, which are made there one by one and never destroyed.
template <typename T, int N> class Places {
 public:
  T *at(int i) { return reinterpret_cast<T *>(bytes) + i; }

 private:
  alignas(T) char bytes[N * sizeof(T)];
};

}  // namespace headrace::HEADRACE_NS
