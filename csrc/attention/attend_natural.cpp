#include "attention/attend.h"

namespace headrace::HEADRACE_NS {

template <typename T> void attend_natural(const Attend &a) { attend_stored<Natural<T>>(a); }

template void attend_natural<bf16>(const Attend &);
template void attend_natural<float>(const Attend &);

}  // namespace headrace::HEADRACE_NS
