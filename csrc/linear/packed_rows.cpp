// Rows of a table that lies as products read it: a head that is the embedding too is held once.
//
// A row is one output of a weight. Its numbers are those that the codes stand for, scale * value and then + offset, each step
// rounded as fp32, whatever lies beside it in its block.
#include "linear/codes.h"
#include "linear/folds.h"
#include "linear/linear.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t SHARED_ELEMENTS = 16384;  // below which waking the other threads costs more than it saves

HEADRACE_INLINE float wide(float x) { return x; }
HEADRACE_INLINE float wide(bf16 x) { return number(static_cast<uint32_t>(x) << 16); }

// Each of these: the inputs of output `n` of a block [64], fp32. A row lies in as many lines as there are pairs of inputs, so those
// AHEAD of it are fetched meanwhile.
constexpr int64_t AHEAD_PAIRS = 24;

template <typename T> void read_numbers(const T *block, int64_t inputs, int64_t n, float *row) {
  for (int64_t k = 0; k < inputs; ++k) {
    __builtin_prefetch(block + (k + 2 * AHEAD_PAIRS) * COLUMNS + n);
    row[k] = wide(block[k * COLUMNS + n]);
  }
}

void read_pairs(const bf16 *block, int64_t inputs, int64_t n, float *row) {
  const bf16 *pair = block + 2 * n;
  for (int64_t k = 0; k < inputs; k += 2, pair += 2 * COLUMNS) {
    __builtin_prefetch(pair + AHEAD_PAIRS * 2 * COLUMNS);
    row[k] = wide(pair[0]);
    row[k + 1] = wide(pair[1]);
  }
}

// `inputs` inputs, an even number, of one output, from an even one on; what they stand for without a scale.
template <typename Codes> void read_values(Codes format, const byte *codes, int64_t inputs, int64_t n, float *values) {
  const int64_t column = n / W * W, lane = n % W;
  const auto reader = format.reader(codes);
  for (int64_t k = 0; k < inputs; k += 2) {
    __builtin_prefetch(codes + (k / 2 + AHEAD_PAIRS) * Codes::BYTES + n / 16 * 16);
    vf first[1], second[1];
    reader.load(k, 0, column, first);
    reader.load(k + 1, 1, column, second);
    values[k] = first[0][lane];
    values[k + 1] = second[0][lane];
  }
}

template <typename Codes> void read_codes(const LinearOf<Codes> &a, int64_t block, int64_t n, float *row) {
  const byte *codes = static_cast<const byte *>(a.codes) + block * (a.inputs / 2 * Codes::BYTES);
  read_values(format_of(a), codes, a.inputs, n, row);
  if constexpr (!Codes::GROUPED) {
    const float scale = static_cast<const float *>(a.scales)[block * COLUMNS + n];
    for (int64_t k = 0; k < a.inputs; ++k) row[k] *= scale;
    return;
  }
  const BlockScales own(a.scaling, a.scales, a.inputs, block);
  const int64_t run = a.scaling.run;
  const bool offset = a.scaling.offset != Offset::none;
  alignas(64) float scales[SCALES], offsets[SCALES];
  for (int64_t first = 0; first < a.inputs; first += BLOCK_INPUTS) {
    const int64_t runs = (a.inputs - first < BLOCK_INPUTS ? a.inputs - first : BLOCK_INPUTS) / run;
    own.widen(first, runs, scales, offsets);
    for (int64_t i = n; i < n + runs * COLUMNS; i += COLUMNS, row += run) {
      for (int64_t k = 0; k < run; ++k) row[k] *= scales[i];
      if (offset)
        for (int64_t k = 0; k < run; ++k) row[k] += offsets[i];
    }
  }
}

template <typename T> void read_row(const PackedRows &a, int64_t index, float *row) {
  const int64_t block = index / COLUMNS, n = index % COLUMNS;
  switch (a.form) {
    case Form::plain: return read_numbers(static_cast<const T *>(a.weight) + block * a.inputs * COLUMNS, a.inputs, n, row);
    case Form::pairs: return read_pairs(static_cast<const bf16 *>(a.weight) + block * a.inputs * COLUMNS, a.inputs, n, row);
    default: {
      LinearQuant codes = {};
      codes.codes = a.weight, codes.scales = a.scales, codes.inputs = a.inputs, codes.form = a.form, codes.scaling = a.scaling;
      with_format(codes, [&](const auto &each) { read_codes(each, block, n, row); });
    }
  }
}

}  // namespace

template <typename T> void packed_rows(const PackedRows &a) {
  share_each(a.rows, a.rows * a.inputs > SHARED_ELEMENTS ? a.threads : 1, [&](int64_t t) {
    Scratch memory = arena(2 * room<float>(a.inputs));
    float *row = memory.take<float>(a.inputs), *ordered = memory.take<float>(a.inputs);
    read_row<T>(a, a.index[t], row);
    if (a.order) {
      for (int64_t i = 0; i < a.inputs; ++i) ordered[a.order[i]] = row[i];
      row = ordered;
    }
    T *out = static_cast<T *>(a.out) + t * a.inputs;
    for (int64_t i = 0; i < a.inputs; i += W)
      store_up_to(out + i, round_as(out, load_up_to(row + i, a.inputs - i)) * splat(a.scale), a.inputs - i);
  });
}

HEADRACE_BOTH_TYPES(packed_rows, PackedRows)

}  // namespace headrace::HEADRACE_NS
