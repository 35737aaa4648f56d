// Which kernel a call of attention takes, and how its work is divided into units.
#include "attention/attend.h"

namespace headrace::HEADRACE_NS {

namespace {

// Most lanes of a unit: their states stay in L2, and the chunks they meet are read once for all of them.
#ifdef __AMX_BF16__
constexpr int64_t UNIT_LANES = 512;
#else
constexpr int64_t UNIT_LANES = 128;
#endif
constexpr int64_t SMALL_LANES = 16;  // fewer share a chunk too little
constexpr int64_t SPLIT_LANES = 64;  // the states of more, one for each block of keys, would be much beside the keys
constexpr int MOST_BLOCKS = 1024;    // of keys that are computed apart: contexts of two million tokens
#ifdef __AMX_BF16__
constexpr int64_t CHUNK_LANES = 128;  // as much time as so many lanes take goes to fetching a chunk
#else
constexpr int64_t CHUNK_LANES = 32;
#endif

// Whether most chunks are offered to one row only, so that rows have no reason to keep together.
bool nothing_shared(const Attend &a) {
  int64_t offered = 0;
  for (int64_t i = 0; i < a.item_count; ++i) offered += a.items[i].row_end - a.items[i].row_begin;
  return offered < 2 * a.item_count;
}

int64_t blocks_of(const Attend &a) {
  if (a.from.block_of || a.to.block_of || a.threads == 1) return 1;
  int64_t most = 0;
  for (int64_t i = 0; i < a.item_count; ++i) most = a.items[i].key_start > most ? a.items[i].key_start : most;
  return most / BLOCK < MOST_BLOCKS ? most / BLOCK + 1 : 1;
}

// How long blocks of keys keep the threads, each of which takes one after another, with so many heads in a unit. The fewer
// heads, the shorter the stretches of memory, behind whose ends the processor fetches some 20 cache lines in vain.
class BlockTime {
 public:
  BlockTime(const Attend &a, int64_t blocks) : a(a), blocks(blocks) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t i = 0; i < blocks; ++i) each[i] = 0;
    for (const Item *item = a.items; item < a.items + a.item_count; ++item)
      each[item->key_start / BLOCK] += CHUNK_LANES + (item->row_end - item->row_begin) * group;
  }

  double of(int64_t heads) const {
    const int64_t groups = a.kv_heads / heads, threads = a.threads < MOST_SHARES ? a.threads : MOST_SHARES;
    int64_t busy[MOST_SHARES] = {}, longest = 0, all = 0;
    for (int64_t i = 0; i < blocks; ++i) all += each[i];
    const bool many = groups * blocks > 8 * threads;  // they come out even
    if (many) longest = all * groups / threads;
    for (int64_t unit = 0; !many && unit < groups * blocks; ++unit) {
      int64_t next = 0;
      for (int64_t i = 1; i < threads; ++i) next = busy[i] < busy[next] ? i : next;
      busy[next] += each[unit % blocks];
      longest = busy[next] > longest ? busy[next] : longest;
    }
    const double stretch = static_cast<double>(heads * CHUNK * a.dim * 2) / 64;
    return static_cast<double>(longest * heads) * (1 + 20 / stretch);
  }

 private:
  const Attend &a;
  int64_t blocks, each[MOST_BLOCKS];
};

// Parts of a group, so that there are units for all threads, each still of as many lanes as one meets together.
int64_t parts_of(int64_t group, int64_t rows, int64_t threads, int64_t units) {
  int64_t parts = 1;
  while (units * parts < threads && group % (2 * parts) == 0 && rows * group / (2 * parts) >= SMALL_LANES) parts *= 2;
  return parts;
}

}  // namespace

UnitSizes unit_sizes(const Attend &a) {
  const int64_t group = a.heads / a.kv_heads, wanted = 4 * a.threads;
  const int64_t most_blocks = a.rows * group > SPLIT_LANES ? 1 : blocks_of(a);
  int64_t rows = UNIT_LANES / group > 1 ? UNIT_LANES / group : 1;
  const auto ranges_of = [&a](int64_t rows) { return (a.rows + rows - 1) / rows; };
  const auto blocks_by = [&](int64_t rows) { return ranges_of(rows) == 1 ? most_blocks : 1; };
  while (rows > 1 && rows * group > SMALL_LANES && a.kv_heads * ranges_of(rows) * blocks_by(rows) < wanted) rows /= 2;
  if (nothing_shared(a)) rows = 1;
  if (rows > a.rows) rows = a.rows;
  const int64_t ranges = ranges_of(rows), blocks = blocks_by(rows);
  const auto fits = [&](int64_t heads) {
    return heads <= MAX_HEADS && heads * rows * group <= UNIT_LANES && a.kv_heads % heads == 0;
  };
  int64_t heads = 1;
  if (blocks == 1) {
    while (fits(2 * heads) && ranges * (a.kv_heads / (2 * heads)) >= a.threads) heads *= 2;
    return {rows, heads, ranges, blocks, parts_of(group, rows, a.threads, ranges * (a.kv_heads / heads))};
  }
  const BlockTime time(a, blocks);
  for (int64_t more = 2; fits(more); more *= 2)
    if (time.of(more) <= time.of(heads)) heads = more;
  return {rows, heads, ranges, blocks, 1};
}

template <typename T> void attend(const Attend &a) {
  if (a.rows == 0) return;
#ifdef __AMX_BF16__
  if constexpr (sizeof(T) == 2)
    if (is_amx(a.dim)) return attend_amx(a);
#endif
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == 2)
    if (is_vnni(a.dim)) return attend_vnni(a);
#endif
  attend_plain<T>(a);
}

HEADRACE_BOTH_TYPES(attend, Attend)

}  // namespace headrace::HEADRACE_NS
