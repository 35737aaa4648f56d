// The MLP of a layer with experts, of composed kernels: rows go to their experts, side by side with all others of the same one.
#pragma once

#include "model/operations.h"

namespace headrace {

// Bytes of memory that `add_experts` needs for `rows` rows.
int64_t experts_scratch(const Experts &experts, int64_t rows);

// y [T, H] += scale * what each row's experts make of x [T, H]; y may be x.
void add_experts(const Experts &experts, Activation activation, const Operations &run, const bf16 *x, bf16 *y, float scale,
                 void *scratch);

// y [T, H] = what each row's experts make of x [T, H], in the same memory as `add_experts`; y may be x. routed [T, H]: what the
// router reads in its place, or null.
void run_experts(const Experts &experts, Activation activation, const Operations &run, const bf16 *x, bf16 *y, void *scratch,
                 const bf16 *routed = nullptr);

}  // namespace headrace
