// Attention of rows over chunks, merged in the canonical order: chunks left to right inside a block of 2,048 keys, then
// blocks left to right. Work is divided into units of (range of KV heads, or part of the query heads of one; range of rows); a unit
// walks all items that touch its rows, and for each its heads, which lie side by side in memory.
//
// R: rows, G: query heads per KV head, D: head size, P: D rounded up to 16; lane: one (row, query head of the group).
#pragma once

#include <new>

#include "attention/head_rows.h"
#include "common/arena.h"
#include "common/shares.h"

namespace headrace::HEADRACE_NS {

// Each in a file of its own, since they take longest to compile; of another set where that one's does the same (lent.cpp).
template <typename T> void attend_plain(const Attend &);
void attend_vnni(const Attend &);
void attend_amx(const Attend &);

constexpr int MAX_HEADS = 32;  // most KV heads of a unit

template <typename Math> struct Unit {
  using Stored = typename Reader<Math>::Number;
  const Attend &a;
  int64_t first, last;
  QueryHeads head;  // of the first KV head
  int64_t heads;    // KV heads, from there on
  Scratch memory;
  int64_t block;  // of keys, -1 for all

  // Transposed keys, of pools without keys.
  static int64_t transposed(const Attend &a) { return a.k ? 0 : Math::BATCH * CHUNK * a.dim; }

  static int64_t bytes(const Attend &a, int64_t rows, int64_t group, int64_t heads) {
    const int64_t space = room<typename Math::Space::Number>(Math::scratch(a.dim)) + room<Stored>(transposed(a));
    return space + heads * HeadRows<Math>::bytes(a, rows, group) + room<const Item *>(a.item_count);
  }

  bool touches(const Item &item) const {
    return item.row_begin < last && item.row_end > first && (block < 0 || item.key_start / BLOCK == block);
  }

  void run() {
    Places<HeadRows<Math>, MAX_HEADS> places;
    HeadRows<Math> *each = places.at(0);
    typename Math::Space space;
    space.scratch = memory.take<typename Math::Space::Number>(Math::scratch(a.dim));
    space.keys = memory.take<Stored>(transposed(a));
    for (int64_t h = 0; h < heads; ++h) {
      new (each + h) HeadRows<Math>(a, {head.kv_head + h, head.first + h * head.count, head.count}, first, last, space, memory);
      each[h].start();
    }
    int64_t count = 0;
    const Item **met = memory.take<const Item *>(a.item_count);
    for (const Item *item = a.items; item < a.items + a.item_count; ++item)
      if (touches(*item)) met[count++] = item;
    walk_all(each, met, count);
    for (int64_t h = 0; h < heads; ++h) each[h].finish();
  }

  void walk_all(HeadRows<Math> *each, const Item *const *items, int64_t count) {
    [[maybe_unused]] const typename Math::template Tiny<true> flushed;
    for (int64_t i = 0; i < count;) i += walk(each, items + i, count - i);
  }

  // Walks the first of `left` items, and those after it that can go with it; returns how many. Several heads of one chunk
  // lie side by side in memory, and are read in that order.
  int walk(HeadRows<Math> *each, const Item *const *items, int64_t left) {
    Visit visits[Math::BATCH];
    if (heads > 1) {
      *visits = each->visit(*items[0], CHUNK * a.dim, items[0]);
      for (int64_t h = 0; h + 1 < heads; ++h) each[h].walk(items, visits, 1);
      const Item *next = left > 1 ? items[1] : nullptr;
      *visits = each->visit(*items[0], next ? distance(*items[0], *next) - (heads - 1) * CHUNK * a.dim : 0, next);
      each[heads - 1].walk(items, visits, 1);
      return 1;
    }
    int count = 1;
    while (count < Math::BATCH && count < left && go_together(*each, *items[0], *items[count])) ++count;
    for (int i = 0; i < count; ++i) {
      const Item *next = i + count < left ? items[i + count] : nullptr;
      visits[i] = each->visit(*items[i], next ? distance(*items[i], *next) : 0, next);
    }
    each->walk(items, visits, count);
    return count;
  }

  int64_t distance(const Item &from, const Item &to) const {
    return (static_cast<int64_t>(to.slot) - from.slot) * a.kv_heads * CHUNK * a.dim;
  }

  static bool go_together(const HeadRows<Math> &rows, const Item &a, const Item &b) {
    return rows.first_of(a) == rows.first_of(b) && rows.last_of(a) == rows.last_of(b) &&
           a.key_start / BLOCK == b.key_start / BLOCK;
  }
};

// How many rows and KV heads a unit has: few rows take many heads, whose chunks lie in one stretch of memory. And how many
// blocks of keys are computed apart: where there is but one range of rows they are what threads share best, since each then
// reads memory of its own; heads of one chunk lie side by side. Rows are divided where blocks do not give enough units: two
// ranges of rows would read what they share twice. So would parts of a KV head's group of query heads, which are the last means.
struct UnitSizes {
  int64_t rows, heads, ranges, blocks, parts;

  int64_t groups(const Attend &a) const { return a.kv_heads / heads; }

  // Units of a range of rows and a block of keys.
  int64_t beside(const Attend &a) const { return groups(a) * parts; }
};

UnitSizes unit_sizes(const Attend &);

template <typename Math> void attend_unit(const Attend &a, const UnitSizes &size, int64_t index, int64_t block) {
  const int64_t beside = size.beside(a), group = a.heads / a.kv_heads / size.parts;
  const int64_t range = size.ranges - 1 - index / beside;  // later rows see more keys: start them first
  const int64_t first = range * size.rows, last = first + size.rows < a.rows ? first + size.rows : a.rows;
  const int64_t part = index % beside, kv_head = part / size.parts * size.heads;
  const QueryHeads heads = {kv_head, (kv_head * size.parts + part % size.parts) * group, group};
  const Scratch memory = arena(Unit<Math>::bytes(a, size.rows, group, size.heads));
  Unit<Math>{a, first, last, heads, size.heads, memory, block}.run();
}

// The state of all rows and heads after each block alone: acc [blocks, R, Hq, D], m and l [blocks, R, Hq], block_of [blocks, R].
struct BlockStates {
  const Attend &a;
  Partial all;
  int32_t *block_of;

  static int64_t bytes(const Attend &a, int64_t blocks) {
    const int64_t lanes = blocks * a.rows * a.heads;
    return room<float>(lanes * a.dim) + 2 * room<float>(lanes) + room<int32_t>(blocks * a.rows);
  }

  BlockStates(const Attend &a, int64_t blocks, Scratch memory) : a(a) {
    const int64_t lanes = blocks * a.rows * a.heads;
    all = {memory.take<float>(lanes * a.dim), memory.take<float>(lanes), memory.take<float>(lanes)};
    block_of = memory.take<int32_t>(blocks * a.rows);
  }

  RunningState of(int64_t block) const {
    const int64_t lane = block * a.rows * a.heads;
    return {{}, {all.acc + lane * a.dim, all.m + lane, all.l + lane}, block_of + block * a.rows};
  }
};

// Blocks apart, each from nothing, then merged from left to right: the same bits.
template <typename Math> void attend_split(const Attend &a, const UnitSizes &size) {
  static thread_local Arena states;
  const BlockStates each(a, size.blocks, states.at_least(BlockStates::bytes(a, size.blocks)));
  const auto attend_block = [&](int64_t i) {
    Attend part = a;
    part.to = each.of(i % size.blocks);
    attend_unit<Math>(part, size, i / size.blocks, i % size.blocks);
  };
  share_out(size.blocks * size.beside(a), a.threads, attend_block, Stretches::common);
  each_lane<Math>(a.rows * a.heads, size.blocks * a.dim, a.threads, [&](int64_t lane) {
    float m, l;
    State mine{{arena(room<float>(a.dim)).take<float>(a.dim), &m, &l}};
    mine.clear(0, a.dim);
    for (int64_t block = 0; block < size.blocks; ++block) {
      const Partial part = each.of(block).block;
      mine.merge<Math>(0, {{part.acc + lane * a.dim, part.m + lane, part.l + lane}}, a.dim);
    }
    const float more = sink_of<Math>(a.sinks, lane % a.heads, m);
    mine.write(0, a.dim, a.dim, static_cast<typename Math::Type *>(a.out) + lane * a.dim, more);
  });
}

template <typename Math> void attend_by(const Attend &a) {
  const UnitSizes size = unit_sizes(a);
  if (size.blocks > 1) return attend_split<Math>(a, size);
  const int64_t units = size.ranges * size.beside(a);
  share_out(units, a.threads, [&](int64_t i) { attend_unit<Math>(a, size, i, -1); }, Stretches::common);
}

template <typename Math> void attend_stored(const Attend &a) { a.k_scale ? attend_by<Quantised<Math>>(a) : attend_by<Math>(a); }

}  // namespace headrace::HEADRACE_NS
