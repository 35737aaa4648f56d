// Checks of index data that Python would be slow to look through: a wrong slot must raise, not read foreign memory.
#pragma once

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace headrace {

inline void check_items(const Attend &a, int64_t slots) {
  for (int64_t n = 0; n < a.item_count; ++n) {
    const Item &item = a.items[n];
    const bool rows = 0 <= item.row_begin && item.row_begin <= item.row_end && item.row_end <= a.rows;
    const bool keys = item.key_start >= 0 && item.key_start % CHUNK == 0;
    if (rows && keys && 0 <= item.slot && item.slot < slots) continue;
    throw std::invalid_argument("items[" + std::to_string(n) + "] = (" + std::to_string(item.slot) + ", " +
                                std::to_string(item.key_start) + ", " + std::to_string(item.row_begin) + ", " +
                                std::to_string(item.row_end) + ") does not fit " + std::to_string(slots) + " slots and " +
                                std::to_string(a.rows) + " rows, or starts inside a chunk");
  }
}

inline void check_bias(const Attend &a) {
  if (!a.bias) return;
  for (int64_t r = 0; r < a.rows; ++r)
    if (a.positions[r] >= a.bias_len)
      throw std::invalid_argument("bias covers " + std::to_string(a.bias_len) + " keys, positions[" + std::to_string(r) +
                                  "] is " + std::to_string(a.positions[r]));
}

inline void check_pairs(const Kernels &kernels) {
  if (!kernels.linear_pairs)
    throw std::invalid_argument("weights were packed for another instruction set; load the model again");
}

inline void check_slots(const Stored &a, int64_t slots) {
  for (int64_t i = 0; i < a.count; ++i)
    if (a.slots[i] < 0 || a.slots[i] >= slots)
      throw std::invalid_argument("slots[" + std::to_string(i) + "] is " + std::to_string(a.slots[i]) + "; there are " +
                                  std::to_string(slots) + " slots");
}

inline void check_places(const Append &a, int64_t slots) {
  for (int64_t t = 0; t < a.rows; ++t)
    if (a.slots[t] < 0 || a.slots[t] >= slots || a.offsets[t] < 0 || a.offsets[t] >= CHUNK)
      throw std::invalid_argument("row " + std::to_string(t) + " goes to slot " + std::to_string(a.slots[t]) + ", offset " +
                                  std::to_string(a.offsets[t]) + "; there are " + std::to_string(slots) + " slots of 64");
}

}  // namespace headrace
