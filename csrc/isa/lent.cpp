// Kernels that a set takes from one before it, where both are built: they use no instruction that only the later one has, give
// the same bits, and need not be compiled twice. The build defines HEADRACE_PLAIN_OF and HEADRACE_VNNI_OF.
#include "isa/simd.h"
#include "kernels.h"

#ifdef HEADRACE_PLAIN_OF
namespace headrace::HEADRACE_PLAIN_OF {
template <typename T> void attend_plain(const Attend &);
template <typename T> void linear_plain(const Linear &);
}  // namespace headrace::HEADRACE_PLAIN_OF

namespace headrace::HEADRACE_NS {
template <typename T> void attend_plain(const Attend &a) { HEADRACE_PLAIN_OF::attend_plain<T>(a); }
template <typename T> void linear_plain(const Linear &a) { HEADRACE_PLAIN_OF::linear_plain<T>(a); }

HEADRACE_BOTH_TYPES(attend_plain, Attend)
HEADRACE_BOTH_TYPES(linear_plain, Linear)
}  // namespace headrace::HEADRACE_NS
#endif

#ifdef HEADRACE_VNNI_OF
namespace headrace::HEADRACE_VNNI_OF {
void attend_vnni(const Attend &);
}
namespace headrace::HEADRACE_NS {
void attend_vnni(const Attend &a) { HEADRACE_VNNI_OF::attend_vnni(a); }
}  // namespace headrace::HEADRACE_NS
#endif
