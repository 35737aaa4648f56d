// What an attention policy offers: how lanes meet one chunk whose keys and values lie in its layout. A policy is made for each
// chunk and head (Reader in quantised.h); n, `lane`, `before` count lanes, of which no more than TOGETHER come at a time.
#pragma once

#include <concepts>

#include "attention/lanes.h"

namespace headrace::HEADRACE_NS {

// Scores by `scores`, into which a bias may be added; probabilities and values as below.
template <typename M>
concept Policy = requires(const M &m, int64_t n, vf x, float *s, const typename M::Type *rows, typename M::Query *q) {
  requires sizeof(typename M::Probability) > 0;          // what probabilities are kept in
  requires sizeof(typename M::template Tiny<true>) > 0;  // how results below 1e-38 are treated in its scope: 0, or kept (false)
  typename M::Space;                                     // what the chunks of a unit of work share: scratch memory, tiles
  requires M::BATCH >= 1 && M::TOGETHER >= 1;            // most chunks that are met at once, most lanes
  { M::PAIRS } -> std::convertible_to<bool>;             // whether keys and values lie in pairs
  { M::RUNNING } -> std::convertible_to<bool>;           // which of the two concepts below it is
  { M::scratch(n) } -> std::same_as<int64_t>;            // elements of Space::scratch for this head size
  M::query(rows, q, n);                                  // n numbers of queries as `scores` reads them
  { M::power(x) } -> std::same_as<vf>;                   // of what its m are in: the weights by which states merge
  m.scores(1, q, s, n);                                  // s [n, 64] = q . k
};

// Each chunk's softmax for itself: m and l of its own, then values times the weights by which it enters the block's state.
template <typename M>
concept ChunkPolicy =
    Policy<M> && !M::RUNNING &&
    requires(const M &m, float *s, const Seen &seen, typename M::Probability *p, const Weights &w, int64_t n) {
      m.probabilities(1, s, seen, 1.0f, p, s, s);
      m.values(1, p, seen, s, w, n);
    };

// A softmax whose sums run on from chunk to chunk (running.h), groups of GROUP lanes, whose probabilities wait for the values.
template <typename M>
concept RunningPolicy = Policy<M> && M::RUNNING && M::GROUP >= 1 &&
                        requires(const M &m, float *s, const Seen &seen, typename M::Probability *p, int64_t index,
                                 typename M::Waiting &waiting, const typename M::Type *next) {
                          { m.k } -> std::convertible_to<const typename M::Type *>;  // read at once: what a group may fetch
                          { m.v } -> std::convertible_to<const typename M::Type *>;
                          // m and l go on; returns the lanes, as bits, whose sums are to be multiplied by the third of the pointers, `keep`.
                          { m.probabilities(1, s, seen, 1.0f, p, s, s, s, m.fetch(index, next)) } -> std::same_as<uint32_t>;
                          m.add_to(waiting, p, seen, index);
                          {
                            m.masks(waiting)
                          } -> std::same_as<bool>;  // whether the last one must meet its values before another waits
                          m.values(&waiting, 1, s);
                        };

}  // namespace headrace::HEADRACE_NS
