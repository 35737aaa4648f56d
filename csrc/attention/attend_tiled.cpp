#include "attention/attend.h"

#ifdef __AMX_BF16__

namespace headrace::HEADRACE_NS {

void attend_tiled(const Attend &a) { attend_stored<Tiled>(a); }

}  // namespace headrace::HEADRACE_NS

#endif
