// Python binding: tensors come as addresses, because that costs a tenth of a DLPack exchange. headrace.kernels.cpu
// checks shapes, types and layouts before it calls; nothing here is public.
//
// Functions whose arguments are all tensors and few numbers take them by place; whatever else there is goes by name.
#pragma once

#include <nanobind/nanobind.h>

#include "common/checks.h"
#include "common/threads.h"
#include "isa/dispatch.h"
#include "model/model_step.h"

namespace headrace {

namespace nb = nanobind;
using namespace nb::literals;

using Address = uint64_t;

using Addresses = std::vector<Address>;

template <typename T> T *at(Address address) { return reinterpret_cast<T *>(address); }

typedef std::vector<Matrix> Matrices;

inline const nb::call_guard<nb::gil_scoped_release> unlocked;
inline const nb::kw_only named;

void bind_attention(nb::module_ &m);
void bind_rows(nb::module_ &m);
void bind_linear(nb::module_ &m);
void bind_model(nb::module_ &m);

}  // namespace headrace
