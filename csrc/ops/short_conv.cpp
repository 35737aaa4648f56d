// Short convolutions between two gates, as LFM2 has them: out = C conv(B x), where the convolution sees the last K rows of a
// sequence. In fp32; what the convolution sees is of the type of `mixed`, so that kept inputs are those that were just made.
//
// T: rows; H: channels; K: inputs of the convolution. Each channel goes its own way, and its segments one after another, so
// that one may begin with the state that another has left. A row's bits depend on the rows of its own sequence alone.
#include <algorithm>

#include "common/arena.h"
#include "common/shares.h"
#include "isa/simd.h"
#include "kernels.h"

namespace headrace::HEADRACE_NS {

namespace {

constexpr int64_t BLOCK = 64;  // channels that a thread takes at least: whole cache lines of a row

// Those in which `seen` keeps the inputs of the next row, the oldest first, and behind them room for its own.
struct ChannelRange {
  int64_t first, width;
  float *seen[ShortConv::MOST_INPUTS];
};

// Of one row: its input, which takes the last place of `seen`, and its output.
template <typename T> void convolve_row(const ShortConv &a, int64_t row, const ChannelRange &range) {
  const T *const gates = static_cast<const T *>(a.mixed) + row * a.mixed_stride + range.first;
  const T *const out_gates = gates + a.channels, *const x = out_gates + a.channels;
  T *const out = static_cast<T *>(a.out) + row * a.channels + range.first;
  const float *const weights = a.conv + range.first;
  const int64_t before = a.kernel - 1;
  for (int64_t c = 0; c < range.width; c += W) {
    const int64_t left = range.width - c;
    const vf own = round_as(gates, load_up_to(gates + c, left) * load_up_to(x + c, left));
    vf y = {};
    for (int64_t j = 0; j < before; ++j) y = madd(load_up_to(weights + j * a.channels + c, left), load(range.seen[j] + c), y);
    y = madd(load_up_to(weights + before * a.channels + c, left), own, y);
    store(range.seen[before] + c, own);
    store_up_to(out + c, y * load_up_to(out_gates + c, left), left);
  }
}

// The rows of a segment, from the state that it begins with to the one that it leaves.
template <typename T> void convolve_segment(const ShortConv &a, const StateSegment &segment, ChannelRange &range) {
  const int64_t before = a.kernel - 1;
  const auto state = [&](int64_t slot, int64_t j) {
    return static_cast<T *>(a.last) + (slot * before + j) * a.channels + range.first;
  };
  for (int64_t j = 0; j < before; ++j)
    for (int64_t c = 0; c < range.width; c += W)
      store(range.seen[j] + c, segment.from < 0 ? vf{} : load_up_to(state(segment.from, j) + c, range.width - c));
  for (int64_t row = segment.row_begin; row < segment.row_end; ++row) {
    convolve_row<T>(a, row, range);
    std::rotate(range.seen, range.seen + 1, range.seen + a.kernel);
  }
  for (int64_t j = 0; j < before; ++j)
    for (int64_t c = 0; c < range.width; c += W)
      store_up_to(state(segment.to, j) + c, load(range.seen[j] + c), range.width - c);
}

}  // namespace

template <typename T> void short_conv(const ShortConv &a) {
  constexpr int64_t MANY_NUMBERS = 32768;  // channels of all rows below which waking the other threads costs more than it saves
  const int threads = a.rows * a.channels < MANY_NUMBERS ? 1 : a.threads;
  share_ranges((a.channels + BLOCK - 1) / BLOCK, threads, [&](int64_t begin, int64_t end) {
    ChannelRange range = {begin * BLOCK, std::min(end * BLOCK, a.channels) - begin * BLOCK, {}};
    const int64_t padded = (end - begin) * BLOCK;
    Scratch scratch = arena(a.kernel * room<float>(padded));
    for (int64_t j = 0; j < a.kernel; ++j) range.seen[j] = scratch.take<float>(padded);
    for (int64_t n = 0; n < a.segment_count; ++n) convolve_segment<T>(a, a.segments[n], range);
  });
}

HEADRACE_BOTH_TYPES(short_conv, ShortConv)

}  // namespace headrace::HEADRACE_NS
