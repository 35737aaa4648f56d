// Products with weights, y[m, n] = sum over k of x[m, k] * w[n, k]: bf16 in pairs, sums in fp32.
//
// M: rows, N: outputs, K: inputs, K2: pairs of inputs. Weights are packed as [N / 64][K2][64][2] (kernels.cpu.Packed), so
// that 16 outputs take one multiply-add of pairs. Every output is one chain of sums over ascending pairs, whatever M,
// tile, block or thread: a row's bits depend on nothing else. With AMX the chain goes by steps of 32 inputs (tiles.h),
// where these are a multiple of 32.
#include "linear/linear.h"

#include "isa/pairs.h"
#include "linear/panel.h"

namespace headrace::HEADRACE_NS {

#ifdef __AVX512BF16__

namespace {

constexpr int64_t STEP = 2 * COLUMNS;  // elements of a packed pair of inputs
constexpr int64_t FEW_TILES = 4;       // so few wait for weights: two blocks of them must fit into L1
constexpr int64_t FEW_PAIRS = 64;      // pairs of a block then: 16 KB of weights
constexpr int64_t MANY_PAIRS = 128;    // otherwise: sums are loaded and stored less often
constexpr int64_t BLOCK_ROWS = 128;    // rows of a task: their sums (32 KB) and inputs stay in L2
constexpr int64_t AHEAD = 12;          // pairs that a single tile fetches ahead,
constexpr int64_t AHEAD_TO_L2 = 4;     // if to L2: the processor's own fetching follows so close behind
constexpr int ALL_LINES = 4;           // of a pair: fetched by a single tile, while several fetch fewer each

// sums[R][64] += x[R][pairs] . w[pairs][64], fetching `ahead` meanwhile.
template <int R, int LINES>
HEADRACE_APART void tile(const bf16 *x, int64_t x_stride, const bf16 *w, int64_t pairs, float *sums, Ahead ahead) {
  __m512 sum[R][4];
  HEADRACE_EACH(r, R, HEADRACE_EACH(c, 4, sum[r][c] = _mm512_load_ps(sums + r * COLUMNS + c * 16)));
  finished_steps<R, 4, LINES, LINES == ALL_LINES>(x, x_stride, w, STEP, pairs, ahead, sum, [&](auto r) HEADRACE_ALWAYS_INLINE {
    HEADRACE_EACH(c, 4, _mm512_store_ps(sums + r * COLUMNS + c * 16, sum[r][c]));
  });
}

void tile_of(int rows, const bf16 *x, int64_t x_stride, const bf16 *w, int64_t pairs, float *sums, Ahead ahead) {
  with_lines<ALL_LINES>(ahead.lines, [&](auto lines) {
    with_tile_rows(rows, [&](auto count) { tile<count, lines>(x, x_stride, w, pairs, sums, ahead); });
  });
}

// All pairs of one packed block of outputs for rows first..last-1; sums [rows, 64].
void multiply(const Linear &a, const bf16 *w, int64_t first, int64_t last, float *sums) {
  const bf16 *x = static_cast<const bf16 *>(a.x) + first * a.x_stride;
  const int64_t pairs = a.inputs / 2;
  const Tiling tiling(last - first);
  memset(sums, 0, tiling.rows * COLUMNS * sizeof(float));
  if (tiling.tiles == 1)
    return tile_of(tiling.rows, x, a.x_stride, w, pairs, sums, {w + (small_l1 ? AHEAD_TO_L2 : AHEAD) * STEP, STEP, ALL_LINES});
  // Each tile fetches its share of the next block of pairs.
  const int64_t tiles = tiling.tiles, stride = (STEP + tiles - 1) / tiles, most = tiles <= FEW_TILES ? FEW_PAIRS : MANY_PAIRS;
  for (int64_t k = 0; k < pairs; k += most) {
    const int64_t count = pairs - k < most ? pairs - k : most;
    const bf16 *block = w + k * STEP, *next = block + count * STEP;
    for (int i = 0; i < tiling.tiles; ++i) {
      const int row = tiling.first(i);
      const Ahead ahead = {next + count * STEP * i / tiles, stride, static_cast<int>((stride + LINE - 1) / LINE)};
      tile_of(tiling.first(i + 1) - row, x + row * a.x_stride + 2 * k, a.x_stride, block, count, sums + row * COLUMNS, ahead);
    }
  }
}

#ifdef __AMX_BF16__
bool tiled(const Linear &a) { return a.inputs % STEP_INPUTS == 0; }
#endif

void multiply_all(const Linear &a, const bf16 *w, int64_t first, int64_t last, float *sums) {
#ifdef __AMX_BF16__
  if (tiled(a)) {
    Tiles tiles;
    const bf16 *x = static_cast<const bf16 *>(a.x) + first * a.x_stride;
    return TileProduct(x, a.x_stride, last - first, w, a.inputs / STEP_INPUTS, sums, tiles).run();
  }
#endif
  multiply(a, w, first, last, sums);
}

void multiply_blocks(const Linear &a) {
  each_block<bf16>(a, BLOCK_ROWS, 0, [](const Linear &own, int64_t block, int64_t first, int64_t last, float *sums, Scratch) {
    multiply_all(own, static_cast<const bf16 *>(own.w) + block * own.inputs * COLUMNS, first, last, sums);
  });
}

}  // namespace

void linear_pairs(const Linear &a) {
#ifdef __AMX_BF16__
  if (tiled(a) && a.groups.each) return by_height<bf16>(a, FEWEST_PANEL_ROWS, linear_pairs, multiply_blocks);
  if (tiled(a) && a.rows >= FEWEST_PANEL_ROWS)
    return each_panel(a, 0, [&](int64_t block, int64_t, Scratch) {
      return PairSource{static_cast<const bf16 *>(a.w) + block * a.inputs * COLUMNS, a.inputs};
    });
#endif
  multiply_blocks(a);
}

#endif

}  // namespace headrace::HEADRACE_NS
