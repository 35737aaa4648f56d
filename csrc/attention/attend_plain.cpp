#include "attention/attend.h"

namespace headrace::HEADRACE_NS {

template <typename T> void attend_plain(const Attend &a) { attend_stored<Plain<T>>(a); }

HEADRACE_BOTH_TYPES(attend_plain, Attend)

}  // namespace headrace::HEADRACE_NS
