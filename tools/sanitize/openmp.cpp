// What the kernels use of OpenMP, on plain threads, for the thread sanitizer: it cannot see through libgomp, whose teams
// meet on futexes, and would call every parallel region a race. run.py says what is missing here.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

struct Team {
  int size;
  std::atomic<long> taken{0};  // iterations handed out; relaxed, so that it orders nothing the kernels share
};

struct Loop {
  long start, end, step, chunk;
};

thread_local Team *team = nullptr;
thread_local int number = 0;
thread_local int loops = 0;
thread_local Loop loop;

}  // namespace

extern "C" {

int omp_get_thread_num() { return number; }
int omp_get_num_threads() { return team ? team->size : 1; }

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned) {
  Team mine{threads > 1 ? static_cast<int>(threads) : 1};
  auto run = [&](int n) {
    team = &mine, number = n, loops = 0;
    body(data);
    team = nullptr, number = 0;
  };
  std::vector<std::thread> others;
  for (int n = 1; n < mine.size; ++n) others.emplace_back(run, n);
  run(0);
  for (std::thread &other : others) other.join();
}

bool GOMP_loop_nonmonotonic_dynamic_next(long *from, long *to) {
  const long first = loop.start + team->taken.fetch_add(loop.chunk, std::memory_order_relaxed) * loop.step;
  if (first >= loop.end) return false;
  *from = first;
  *to = first + loop.chunk * loop.step < loop.end ? first + loop.chunk * loop.step : loop.end;
  return true;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *from, long *to) {
  if (!team || ++loops > 1 || step < 1) {
    fputs("tools/sanitize/openmp.cpp: one rising loop per parallel region, please\n", stderr);
    abort();
  }
  loop = {start, end, step, chunk};
  return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

void GOMP_loop_end_nowait() {}

}  // extern "C"
