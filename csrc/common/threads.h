// The threads that run kernels. Each thread that calls kernels has a team of its own, whose workers wait between two calls.
//
// A call never waits for a worker that has not begun: whoever is there takes what is left, and the caller waits for tasks
// under way alone. So a core that is slowed down, or taken away by another process, holds up no call for longer than a task.
#pragma once

#include <cstdint>

namespace headrace {

constexpr int MOST_SHARES = 256;  // of threads; more would find nothing to do

// Own: each thread goes through a stretch of its own in order, as the memory behind it lies, then takes the last ones of whoever
// has some left. Common: everyone takes the next one of all.
enum class Stretches { own, common };

struct Tasks {
  void (*run)(void *context, int64_t task);
  void *context;
  int64_t count;  // below 2^32
};

// Tasks 0 .. count - 1, each once, on up to `threads` threads; all are done when it returns. Runs them on fewer threads where the
// system gives no more, and on the calling one alone from within a task.
void run_tasks(const Tasks &tasks, int threads, Stretches stretches);

// Two threads hand a word to each other, `rounds` times there and back; false where there is but one.
bool hand_over(int64_t rounds);

}  // namespace headrace
