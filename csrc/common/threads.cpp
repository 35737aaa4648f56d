#include "common/threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <csignal>
#include <ctime>

// The first ones of glibc, which every system has: those of 2.32 and 2.34 are the same.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join, pthread_join@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.12");
#elif defined(__aarch64__) && defined(__GLIBC__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.17");
__asm__(".symver pthread_join, pthread_join@GLIBC_2.17");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.17");
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.17");
#endif

namespace headrace {
namespace {

// Whoever waits spins for so long, then sleeps: about as long as it takes to be woken. Others may need the core.
constexpr int64_t SPIN_NS = 50'000;

// A team's state is one word: the number of the job, whether somebody sleeps until its last worker has left, whether workers are
// to end, whether they may enter, and how many have.
constexpr uint32_t INSIDE = (1u << 9) - 1, OPEN = 1u << 9, ENDS = 1u << 10, AWAITED = 1u << 11, JOB = 1u << 12;
static_assert(MOST_SHARES <= INSIDE);

// Who sleeps on that word.
constexpr uint32_t CALLER = 1, WORKER = 2;

void sleep_while(std::atomic<uint32_t> &word, uint32_t value, uint32_t who) {
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, value, nullptr, nullptr, who);
}

void wake(std::atomic<uint32_t> &word, int count, uint32_t who) {
  syscall(SYS_futex, &word, FUTEX_WAKE_BITSET_PRIVATE, count, nullptr, nullptr, who);
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins for a moment each time it is asked whether that has been long enough.
class Spin {
 public:
  bool over() {
    for (int i = 0; i < 8; ++i) relax();
    const int64_t now = now_ns();
    if (!until) until = now + SPIN_NS;
    return now >= until;
  }

 private:
  int64_t until = 0;
};

// What is left of a thread's stretch: its first task, and above it in the upper half the one behind its last.
struct alignas(64) Stretch {
  std::atomic<uint64_t> left;

  void set(int64_t first, int64_t end) { left.store(static_cast<uint64_t>(end) << 32 | first, std::memory_order_relaxed); }

  // The first task, or the last; -1: there is none.
  int64_t take(bool last) {
    uint64_t now = left.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t first = static_cast<uint32_t>(now), end = static_cast<uint32_t>(now >> 32);
      if (first == end) return -1;
      const uint64_t rest = last ? now - (1ull << 32) : now + 1;
      if (left.compare_exchange_weak(now, rest, std::memory_order_relaxed)) return last ? end - 1 : first;
    }
  }
};

thread_local bool in_task = false;

class Team {
 public:
  explicit Team(int wanted) : wanted(wanted) {
    sigset_t all, before;  // signals are for the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (size = 1; size < wanted; ++size) {
      seats[size] = {this, size};
      if (pthread_create(&workers[size], nullptr, work, &seats[size])) break;
      pthread_setname_np(workers[size], "kernels");
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  Team(const Team &) = delete;

  ~Team() {
    state.store(ENDS);
    wake(state, INT_MAX, WORKER);
    for (int i = 1; i < size; ++i) pthread_join(workers[i], nullptr);
  }

  const int wanted;

  void run(const Tasks &tasks, Stretches kind) {
    job = tasks;
    stretches = kind == Stretches::own ? size : 1;
    for (int64_t i = 0; i < stretches; ++i) all[i].set(tasks.count * i / stretches, tasks.count * (i + 1) / stretches);
    const uint32_t number = state.load(std::memory_order_relaxed) / JOB + 1;
    state.store(number * JOB | OPEN);
    if (sleepers.load()) wake(state, static_cast<int>(tasks.count < size ? tasks.count : size) - 1, WORKER);
    go_through(0);
    wait_for_workers();
  }

 private:
  struct Seat {
    Team *team;
    int number;
  };

  static void *work(void *seat) {
    const Seat &mine = *static_cast<const Seat *>(seat);
    mine.team->work(mine.number);
    return nullptr;
  }

  void work(int number) {
    for (uint32_t done = 0;;) {
      uint32_t seen = wait_for_job(done);
      if (seen & ENDS) return;
      if (!state.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) continue;
      done = seen / JOB;
      go_through(number);
      const uint32_t left = state.fetch_sub(1, std::memory_order_acq_rel) - 1;
      if ((left & AWAITED) && !(left & INSIDE)) wake(state, 1, CALLER);
    }
  }

  uint32_t wait_for_job(uint32_t done) {
    for (Spin spin;;) {
      const uint32_t seen = state.load(std::memory_order_acquire);
      if (seen & ENDS || (seen & OPEN && seen / JOB != done)) return seen;
      if (!spin.over()) continue;
      sleepers.fetch_add(1);  // before the word is looked at again: whoever changes it looks here afterwards
      sleep_while(state, seen, WORKER);
      sleepers.fetch_sub(1);
    }
  }

  void go_through(int number) {
    in_task = true;
    for (int i = 0; i < stretches; ++i) {
      Stretch &stretch = all[(number + i) % stretches];
      for (int64_t task; (task = stretch.take(i > 0)) >= 0;) job.run(job.context, task);
    }
    in_task = false;
  }

  // Lets nobody enter any more, and returns when nobody is inside.
  void wait_for_workers() {
    state.fetch_and(~OPEN, std::memory_order_acq_rel);
    for (Spin spin;;) {
      uint32_t seen = state.load(std::memory_order_acquire);
      if (!(seen & INSIDE)) return;
      if (!spin.over()) continue;
      if (seen & AWAITED || state.compare_exchange_strong(seen, seen | AWAITED, std::memory_order_acquire))
        sleep_while(state, seen | AWAITED, CALLER);
    }
  }

  alignas(64) std::atomic<uint32_t> state{0};
  alignas(64) std::atomic<int> sleepers{0};
  Tasks job{};
  int stretches = 0, size = 1;
  Stretch all[MOST_SHARES];
  Seat seats[MOST_SHARES];
  pthread_t workers[MOST_SHARES];
};

std::atomic<int> forks{0};  // of processes between the first one and this one: a fork takes no worker along

// The calling thread's team.
class Own {
 public:
  ~Own() { replace(nullptr); }

  Team &of(int threads) {
    static const int told = pthread_atfork(nullptr, nullptr, [] { ++forks; });
    static_cast<void>(told);
    if (!team || team->wanted != threads || made_after != forks) replace(new Team(threads));
    return *team;
  }

 private:
  void replace(Team *next) {
    if (made_after == forks) delete team;  // else its workers live in another process
    team = next;
    made_after = forks;
  }

  Team *team = nullptr;
  int made_after = 0;
};

}  // namespace

void run_tasks(const Tasks &tasks, int threads, Stretches stretches) {
  if (threads > MOST_SHARES) threads = MOST_SHARES;
  if (threads < 2 || tasks.count < 2 || in_task) {
    for (int64_t task = 0; task < tasks.count; ++task) tasks.run(tasks.context, task);
    return;
  }
  static thread_local Own own;
  own.of(threads).run(tasks, stretches);
}

bool hand_over(int64_t rounds) {
  struct Hands {
    int64_t rounds;
    std::atomic<int64_t> turn{0};

    void *go(int me) {
      for (int64_t i = 0; i < rounds; ++i) {
        while (turn.load(std::memory_order_acquire) != 2 * i + me) {
        }
        turn.store(2 * i + me + 1, std::memory_order_release);
      }
      return nullptr;
    }
  } hands{rounds};
  pthread_t other;
  if (pthread_create(&other, nullptr, [](void *both) { return static_cast<Hands *>(both)->go(1); }, &hands)) return false;
  hands.go(0);
  pthread_join(other, nullptr);
  return true;
}

}  // namespace headrace
