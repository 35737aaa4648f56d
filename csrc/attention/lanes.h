// Softmax over one chunk of 64 keys, lane by lane. A lane is one (row, query head); lanes come in groups of up to LANES.
#pragma once

#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

constexpr int LANES = 32;  // keys and values come from L2 once for so many

// How a chunk's contribution enters each lane's state: acc = acc * keep + chunk * take.
struct Weights {
  alignas(64) float keep[LANES + W];
  alignas(64) float take[LANES + W];
};

// Which keys of a chunk each lane of a group sees: low[lane]..high[lane]-1, or all 64 of them.
struct Seen {
  bool everything = false;
  int low[LANES], high[LANES];
  uint32_t only = 0;  // lanes of rows that see but one key, of all chunks, as bits

  int from(int lane) const { return everything ? 0 : low[lane]; }
  int to(int lane) const { return everything ? CHUNK : high[lane]; }

  bool only_key(int lane) const { return only >> lane & 1; }

  uint64_t mask(int lane) const {
    const int first = from(lane), last = to(lane);
    return last <= first ? 0 : (~0ull >> (CHUNK - (last - first))) << first;
  }

  // The keys that some of `n` lanes from `lane` on sees.
  uint64_t union_of(int lane, int n) const {
    uint64_t keys = everything ? ~0ull : 0;
    for (int r = lane; r < lane + n && !everything; ++r) keys |= mask(r);
    return keys;
  }
};

// How some lanes meet a chunk: `ahead` elements from its keys lie those that are read next (0: none). Of these and of those,
// only so many from the first on are seen by anybody: the rest need not be read.
struct Visit {
  int64_t ahead, lanes;
  int keys, next_keys;
};

// Keys and values of a chunk and KV head. stored: where the pool has these keys. Where it has values alone, which are the keys
// too, those, of which `k` is a copy (transposed.h). What is read next lies as far behind `stored` as behind `v`.
template <typename S> struct ChunkOf {
  const S *k, *v, *stored;
};

// What the chunks that a unit of work meets share: memory for the policy's own use, and transposed keys.
template <typename T> struct ChunkSpace {
  using Number = T;
  T *scratch;  // [Math::scratch(dim)]
  void *keys;  // [Math::BATCH][64 D] of the pool's numbers, where it has values alone
};

}  // namespace headrace::HEADRACE_NS
