// Choice of the instruction set, once per process.
#pragma once

#include "kernels.h"

namespace headrace {

// Sets built into this extension that this processor can run, from plain to fast, separated by commas.
const char *available_isas();

// All sets built into this extension, likewise.
const char *built_isas();

// The kernels in use. The first call reads HEADRACE_ISA; without it the fastest available set is taken.
// Throws std::invalid_argument, naming what exists, where HEADRACE_ISA names anything else or nothing that was built can run.
const Kernels &kernels();
const char *isa();

// Replaces the choice (tests run every set in one process).
void use_isa(const char *name);

// Takes the first cache for one of so many KB, or of what the system says (0): what is fetched where, and nothing else, goes by
// it.
void use_l1(int kilobytes);

}  // namespace headrace
