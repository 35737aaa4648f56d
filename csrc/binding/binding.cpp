// The module of the extension: each subject's part, instruction sets and probes.
#include "binding/binding.h"

namespace headrace {

namespace {

void probe_read(Address from, int64_t bytes, int threads) { kernels().probe_read(at<void>(from), bytes, threads); }

int64_t probe_multiply(int64_t rounds, int threads) { return kernels().probe_multiply(rounds, threads); }

void exp_many(Address x, Address out, int64_t n) { kernels().exp(at<float>(x), at<float>(out), n); }

}  // namespace

}  // namespace headrace

using namespace headrace;

NB_MODULE(_cpu, m) {
  bind_attention(m);
  bind_rows(m);
  bind_linear(m);
  bind_model(m);
  m.def("exp", exp_many, unlocked);
  m.def("probe_read", probe_read, unlocked);
  m.def("probe_multiply", probe_multiply, unlocked);
  m.def("probe_handover", hand_over, unlocked);
  m.def("available_isas", available_isas);
  m.def("built_isas", built_isas);
  m.def("isa", isa);
  m.def("use_isa", use_isa);
  m.def("use_l1", use_l1);
}
