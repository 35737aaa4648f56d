// Products of rows rounded to int8: what linear_quant does with weights of the form w8a8.
#pragma once

#include "linear/linear.h"

namespace headrace::HEADRACE_NS {

template <typename T> void linear_w8a8(const LinearQuant &a);

}  // namespace headrace::HEADRACE_NS
