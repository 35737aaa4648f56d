#include "attention/attend.h"

#ifdef __AVX512BF16__

namespace headrace::HEADRACE_NS {

void attend_vnni(const Attend &a) { attend_stored<Vnni>(a); }

}  // namespace headrace::HEADRACE_NS

#endif
