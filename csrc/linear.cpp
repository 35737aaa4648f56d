// Products with weights, y[m, n] = sum over k of x[m, k] * w[n, k]: bf16 in pairs, sums in fp32.
//
// M: rows, N: outputs, K: inputs, K2: pairs of inputs. Weights are packed as [N / 64][K2][64][2] (kernels.cpu.Packed), so
// that 16 outputs take one multiply-add of pairs. Every output is one chain of sums over ascending pairs, whatever M,
// tile, block or thread: a row's bits depend on nothing else.
#include "arena.h"
#include "kernels.h"
#include "pairs.h"
#include "simd.h"

namespace headrace::HEADRACE_NS {

#ifdef __AVX512BF16__

namespace {

constexpr int64_t COLUMNS = 64;       // outputs in a packed block: four vectors
constexpr int64_t BLOCK_PAIRS = 128;  // pairs of a block: 32 KB of weights, which stay in L1 while rows pass by
constexpr int64_t BLOCK_ROWS = 128;   // rows of a task: their sums (32 KB) and inputs stay in L2
constexpr int64_t AHEAD = 12;         // pairs that a single group of rows fetches ahead

// sums[R][64] += x[R][pairs] . w[pairs][64], fetching LINES cache lines of `next` for each pair meanwhile.
template <int R, int LINES>
void tile(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t pairs, float *sums, const bf16 *next) {
  __m512 sum[R][4];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_load_ps(sums + r * COLUMNS + c * 16);
  pair_steps<R, 4, LINES>(x, x_stride, w, 2 * COLUMNS, pairs, {next, 2 * COLUMNS, LINES}, sum);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 4; ++c) _mm512_store_ps(sums + r * COLUMNS + c * 16, sum[r][c]);
}

template <int LINES>
void tile_of(int rows, const bf16 *x, int64_t x_stride, const bf16 *w, int64_t pairs, float *sums, const bf16 *next) {
  switch (rows) {
    case 1: return tile<1, LINES>(x, x_stride, w, pairs, sums, next);
    case 2: return tile<2, LINES>(x, x_stride, w, pairs, sums, next);
    case 3: return tile<3, LINES>(x, x_stride, w, pairs, sums, next);
    default: return tile<4, LINES>(x, x_stride, w, pairs, sums, next);
  }
}

// All pairs of one packed block of outputs for rows first..last-1; sums [rows, 64].
void multiply(const Linear &a, const bf16 *w, int64_t first, int64_t last, float *sums) {
  const bf16 *x = static_cast<const bf16 *>(a.x) + first * a.x_stride;
  const int64_t pairs = a.inputs / 2, rows = last - first;
  memset(sums, 0, rows * COLUMNS * sizeof(float));
  if (rows <= TILE_ROWS) return tile_of<4>(rows, x, a.x_stride, w, pairs, sums, w + AHEAD * 2 * COLUMNS);
  for (int64_t k = 0; k < pairs; k += BLOCK_PAIRS) {
    const int64_t count = pairs - k < BLOCK_PAIRS ? pairs - k : BLOCK_PAIRS;
    const bf16 *block = w + k * 2 * COLUMNS, *next = block + count * 2 * COLUMNS;
    for (int64_t row = 0, group = 0; row < rows; row += TILE_ROWS, ++group) {
      const int n = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
      const bf16 *from = x + row * a.x_stride + 2 * k;
      // Each of the first four groups fetches one of the four lines of the next block's pairs.
      if (group < 4) tile_of<1>(n, from, a.x_stride, block, count, sums + row * COLUMNS, next + group * 32);
      else tile_of<0>(n, from, a.x_stride, block, count, sums + row * COLUMNS, next);
    }
  }
}

template <typename T> void write(const Linear &a, int64_t column, int64_t first, int64_t last, const float *sums) {
  const int64_t count = a.outputs - column < COLUMNS ? a.outputs - column : COLUMNS;
  const bf16 *bias = static_cast<const bf16 *>(a.bias);
  for (int64_t row = first; row < last; ++row, sums += COLUMNS) {
    T *out = static_cast<T *>(a.out) + row * a.outputs + column;
    for (int64_t c = 0; c < count; c += W) {
      const int64_t n = count - c < W ? count - c : W;
      vf y = load(sums + c);
      if (bias) y = y + (n == W ? load(bias + column + c) : load_part(bias + column + c, n));
      n == W ? store(out + c, y) : store_part(out + c, y, n);
    }
  }
}

}  // namespace

void linear(const Linear &a) {
  const int64_t blocks = (a.outputs + COLUMNS - 1) / COLUMNS, ranges = (a.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (blocks * ranges > 1)
  for (int64_t i = 0; i < blocks * ranges; ++i) {
    const int64_t block = i % blocks, first = i / blocks * BLOCK_ROWS;
    const int64_t last = first + BLOCK_ROWS < a.rows ? first + BLOCK_ROWS : a.rows;
    float *sums = arena(BLOCK_ROWS * COLUMNS);
    multiply(a, static_cast<const bf16 *>(a.w) + block * a.inputs * COLUMNS, first, last, sums);
    a.wide ? write<float>(a, block * COLUMNS, first, last, sums) : write<bf16>(a, block * COLUMNS, first, last, sums);
  }
}

#endif

}  // namespace headrace::HEADRACE_NS
