// Checks of index data that Python would be slow to look through: a wrong slot must raise, not read foreign memory.
#pragma once

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace headrace {

inline std::string text(const char *word) { return word; }
inline std::string text(int64_t number) { return std::to_string(number); }

// Throws std::invalid_argument with these words and numbers, one behind the other.
template <typename... T> [[noreturn]] void refuse(T... words) { throw std::invalid_argument((text(words) + ...)); }

inline void check_index(const char *what, const int64_t *index, int64_t rows, int64_t count) {
  for (int64_t t = 0; t < rows; ++t)
    if (index[t] < 0 || index[t] >= count) refuse(what, " of row ", t, " is ", index[t], ", of ", count);
}

inline void check_items(const Attend &a, int64_t slots) {
  for (int64_t n = 0; n < a.item_count; ++n) {
    const Item &item = a.items[n];
    const bool rows = 0 <= item.row_begin && item.row_begin <= item.row_end && item.row_end <= a.rows;
    const bool keys = item.key_start >= 0 && item.key_start % CHUNK == 0;
    if (rows && keys && 0 <= item.slot && item.slot < slots) continue;
    refuse("items[", n, "] = (", item.slot, ", ", item.key_start, ", ", item.row_begin, ", ", item.row_end, ") does not fit ",
           slots, " slots and ", a.rows, " rows, or starts inside a chunk");
  }
}

inline void check_chosen(const Gather &g, int64_t slots) {
  for (int64_t r = 0; r < g.rows; ++r)
    for (int64_t n = 0; n < g.count; ++n) {
      const int64_t key = g.chosen[r * g.count + n];
      const int64_t slot = 0 <= key && key < g.table * CHUNK ? g.tables[r * g.table + key / CHUNK] : -1;
      if (slot < 0 || slot >= slots) refuse("row ", r, " has chosen key ", key, ", which lies in none of its chunks");
    }
}

inline void check_bias(const Attend &a) {
  if (!a.bias) return;
  for (int64_t r = 0; r < a.rows; ++r)
    if (a.positions[r] >= a.bias_len) refuse("bias covers ", a.bias_len, " keys, positions[", r, "] is ", a.positions[r]);
}

inline void check_pairs(const Kernels &kernels) {
  if (!kernels.linear_pairs) refuse("weights were packed for another instruction set; load the model again");
}

inline void check_routing(const Routing &routing, int64_t experts, int64_t chosen) {
  const int64_t groups = routing.groups, met = routing.met_groups, size = groups < 1 ? 0 : experts / groups;
  if (groups < 1 || experts % groups || met < 1 || met > groups || routing.summed < 1 || routing.summed > size || chosen < 1 ||
      chosen > met * size)
    refuse(chosen, " of ", experts, " experts cannot be chosen from ", met, " of ", groups, " groups by the best ",
           routing.summed);
}

template <typename Arguments> void check_segments(const Arguments &a, int64_t slots) {
  for (int64_t n = 0; n < a.segment_count; ++n) {
    const StateSegment &s = a.segments[n];
    const bool rows = 0 <= s.row_begin && s.row_begin <= s.row_end && s.row_end <= a.rows;
    if (rows && -1 <= s.from && s.from < slots && 0 <= s.to && s.to < slots) continue;
    refuse("segments[", n, "] = (", s.row_begin, ", ", s.row_end, ", ", s.from, ", ", s.to, ") does not fit ", slots,
           " slots and ", a.rows, " rows");
  }
}

inline void check_slots(const Stored &a, int64_t slots) {
  for (int64_t i = 0; i < a.count; ++i)
    if (a.slots[i] < 0 || a.slots[i] >= slots) refuse("slots[", i, "] is ", a.slots[i], "; there are ", slots, " slots");
}

inline void check_places(const Append &a, int64_t slots) {
  for (int64_t t = 0; t < a.rows; ++t)
    if (a.slots[t] < 0 || a.slots[t] >= slots || a.offsets[t] < 0 || a.offsets[t] >= CHUNK)
      refuse("row ", t, " goes to slot ", a.slots[t], ", offset ", a.offsets[t], "; there are ", slots, " slots of 64");
}

}  // namespace headrace
