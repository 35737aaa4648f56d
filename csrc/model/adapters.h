// What adapters add to products (LoRA, arXiv 2106.09685), of composed kernels: rows go to their adapters' matrices, side by side
// with all others of the same adapter.
#pragma once

#include <vector>

#include "model/operations.h"

namespace headrace {

// The rows of a tile that have an adapter.
struct AdaptedRows {
  // numbers [rows]: of each row's adapter, of `adapters`; -1: none. scratch: for all of the tile's products, see low_rank_scratch.
  AdaptedRows(const int64_t *numbers, int64_t rows, int64_t adapters, void *scratch);

  int64_t size() const { return static_cast<int64_t>(order.size()); }

  std::vector<int64_t> order;  // their places in the tile, by adapter, those of one in their order
  std::vector<int64_t> begin;  // where each adapter's are in `order`, and behind the last the end
  bool whole;                  // they are all rows of the tile, as they come
  void *scratch;
};

// Bytes of memory for the products of `rows` rows with a matrix that adapters change.
int64_t low_rank_scratch(const Matrix &m, int64_t rows);

}  // namespace headrace
