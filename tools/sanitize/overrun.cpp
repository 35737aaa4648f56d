// A deliberate error: the element behind a piece of scratch memory, before the next piece. run.py expects it to be reported.
// With an argument it stays inside, of which nothing must be reported.
#include "common/arena.h"

int main(int count, char **) {
  using namespace headrace::HEADRACE_NS;
  Scratch memory = arena(2 * room<float>(20));
  float *first = memory.take<float>(20), *second = memory.take<float>(20);
  for (int i = 0; i < 20; ++i) first[i] = second[i] = 1.0f;
  volatile float *behind = first + (count > 1 ? 19 : 20);
  *behind = 2.0f;
  return 0;
}
