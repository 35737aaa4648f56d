#include "attention/attend.h"

#ifdef __AVX512BF16__

namespace headrace::HEADRACE_NS {

void attend_paired(const Attend &a) { attend_stored<Paired>(a); }

}  // namespace headrace::HEADRACE_NS

#endif
