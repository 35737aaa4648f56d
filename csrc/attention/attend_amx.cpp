#include "attention/attend.h"

#ifdef __AMX_BF16__

namespace headrace::HEADRACE_NS {

void attend_amx(const Attend &a) { attend_stored<Amx>(a); }

}  // namespace headrace::HEADRACE_NS

#endif
