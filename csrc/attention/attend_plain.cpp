#include "attention/attend.h"

namespace headrace::HEADRACE_NS {

template <typename T> void attend_plain(const Attend &a) { attend_stored<Plain<T>>(a); }

template void attend_plain<bf16>(const Attend &);
template void attend_plain<float>(const Attend &);

}  // namespace headrace::HEADRACE_NS
