// Whose memory the objects of this room use: Python's, where kernels.block, cpu_step and model_step keep every tensor behind an
// address, and every object behind a reference or pointer, for as long as the C++ object that was made of it. Nothing here frees
// or counts. Memory of a single call (x, scratch, logits) comes as a plain pointer, of which nothing is left after the call.
#pragma once

namespace headrace {

// An address of something that must outlive whoever holds this.
template <typename T> class Borrowed {
 public:
  Borrowed(T *lent = nullptr) : lent(lent) {}
  operator T *() const { return lent; }

 private:
  T *lent;
};

}  // namespace headrace
