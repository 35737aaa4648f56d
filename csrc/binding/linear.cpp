// Matrices, products by them, and the experts that rows go to.
#include <nanobind/stl/vector.h>

#include "binding/binding.h"

namespace headrace {

namespace {

void make_scaling(Scaling *self, Number number, Offset offset, Subs subs, int64_t block, int64_t group, int64_t run) {
  if (block && (group < 1 || block % group || run < 16 || run > 64 || run & (run - 1) || group % run))
    throw std::invalid_argument("a group must divide its block, and a run, of 16, 32 or 64 inputs, its group");
  new (self) Scaling{number, offset, subs, block, group, run};
}

void make_matrix(Matrix *self, Form form, Address weight, Address scales, Address bias, int64_t inputs, int64_t outputs,
                 bool gated, const Scaling &scaling, Address order) {
  if (scaling.block && inputs % scaling.block) throw std::invalid_argument("inputs must be a multiple of a scale's block");
  new (self)
      Matrix{form, at<void>(weight), at<void>(scales), at<bf16>(bias), inputs, outputs, gated, scaling, at<int32_t>(order)};
}

Matrix matrix_of_parts(const std::vector<Matrix> &parts, Address bias, int64_t inputs, int64_t outputs) {
  int64_t sum = 0;
  for (const Matrix &part : parts) sum += part.inputs == inputs && !part.gated ? part.outputs : outputs + 1;
  if (sum != outputs || parts.empty()) throw std::invalid_argument("the parts do not make up the matrix");
  Matrix whole = {Form::plain, nullptr, nullptr, at<bf16>(bias), inputs, outputs, false};
  whole.parts = parts;
  return whole;
}

// The same matrix, to whose products adapters add (LowRank): `count` of them, and of those with these numbers what they have.
Matrix matrix_adapted(const Matrix &self, const std::vector<int64_t> &numbers, const Matrices &down, const Matrices &up,
                      int64_t count) {
  if (numbers.empty() || down.size() != numbers.size() || up.size() != numbers.size())
    refuse("each adapter needs its two matrices");
  LowRank made = {down.front().outputs, Matrices(count), Matrices(count), {}};
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (down[i].inputs != self.inputs || down[i].outputs != made.rank || up[i].inputs != made.rank ||
        up[i].outputs != self.outputs || down[i].gated || up[i].gated)
      refuse("matrices of adapter ", numbers[i], " do not fit the one that they change");
    made.down.at(numbers[i]) = down[i], made.up.at(numbers[i]) = up[i];
  }
  const int64_t half = self.outputs / 2;
  if (self.gated && self.bias)
    for (int64_t i = 0; i < self.outputs; ++i)
      made.turned.push_back(self.bias[i / TOPS % 2 * half + i / (2 * TOPS) * TOPS + i % TOPS]);
  Matrix whole = self;
  whole.adapters = std::make_shared<const LowRank>(made);
  return whole;
}

// The matrix's bias is of the type of x, whatever its own says.
void linear(int type, Address x, const Matrix &m, Address out, int64_t rows, int64_t x_stride, bool wide, Gate gate,
            int threads) {
  const Epilogue epilogue = {.gated = m.gated, .gate = gate};
  multiply(kernels(), m, {type, at<void>(x), rows, x_stride, at<void>(out), wide, threads, epilogue});
}

void packed_rows(int type, const Matrix &m, Address index, Address out, int64_t rows, int threads) {
  look_up(kernels(), m, type, at<int64_t>(index), rows, at<void>(out), 1.0f, threads);
}

// Rows begin[e] .. begin[e + 1] - 1 by matrix e.
void linear_groups(int type, Address x, const Matrices &matrices, const std::vector<int64_t> &begin, Address out, int64_t rows,
                   int64_t x_stride, Gate gate, int threads) {
  if (matrices.empty() || begin.size() != matrices.size() + 1 || begin.front() != 0 || begin.back() != rows)
    refuse("rows of groups must begin at 0 and end at ", rows);
  for (size_t e = 0; e < matrices.size(); ++e)
    if (begin[e + 1] < begin[e]) refuse("group ", static_cast<int64_t>(e), " ends before it begins");
  check_shapes(matrices);
  const Epilogue epilogue = {.gated = matrices.front().gated, .gate = gate};
  multiply_groups(kernels(), matrices, begin, {type, at<void>(x), rows, x_stride, at<void>(out), false, threads, epilogue});
}

void make_routing(Routing *self, bool sigmoid, int64_t groups, int64_t met_groups, int64_t summed, float scale) {
  new (self) Routing{sigmoid, groups, met_groups, summed, scale};
}

void route(Address x, Address expert, Address share, const Routing &routing, Address correction, int64_t rows, int64_t experts,
           int64_t chosen, bool normalised, int threads) {
  check_routing(routing, experts, chosen);
  kernels().route({at<float>(x), at<int32_t>(expert), at<float>(share), rows, experts, chosen, normalised, threads, routing,
                   at<float>(correction)});
}

void combine(int type, Address y, Address place, Address share, Address out, int64_t rows, int64_t chosen, int64_t width,
             int threads) {
  for (int64_t i = 0; i < rows * chosen; ++i)
    if (const int32_t found = at<int32_t>(place)[i]; found < 0 || found >= rows * chosen)
      refuse("place[", i, "] is ", static_cast<int64_t>(found), ", of ", rows * chosen, " rows");
  kernels().combine[type](
      {at<void>(y), at<int32_t>(place), at<float>(share), nullptr, at<void>(out), rows, chosen, width, threads});
}

}  // namespace

void bind_linear(nb::module_ &m) {
  m.def("linear", linear, unlocked, "type"_a, "x"_a, "matrix"_a, "out"_a, named, "rows"_a, "x_stride"_a, "wide"_a, "gate"_a,
        "threads"_a);
  m.def("packed_rows", packed_rows, unlocked, "type"_a, "matrix"_a, "index"_a, "out"_a, named, "rows"_a, "threads"_a);
  m.def("linear_groups", linear_groups, unlocked, "type"_a, "x"_a, "matrices"_a, "begin"_a, "out"_a, named, "rows"_a,
        "x_stride"_a, "gate"_a, "threads"_a);
  nb::class_<Routing>(m, "Routing")
      .def("__init__", make_routing, named, "sigmoid"_a, "groups"_a, "met_groups"_a, "summed"_a, "scale"_a);
  m.def("route", route, unlocked, "x"_a, "expert"_a, "share"_a, "routing"_a, "correction"_a, named, "rows"_a, "experts"_a,
        "chosen"_a, "normalised"_a, "threads"_a);
  m.def("combine", combine, unlocked, "type"_a, "y"_a, "place"_a, "share"_a, "out"_a, named, "rows"_a, "chosen"_a, "width"_a,
        "threads"_a);
  nb::enum_<Gate>(m, "Gate")
      .value("silu", Gate::silu)
      .value("gelu_tanh", Gate::gelu_tanh)
      .value("swiglu_oai", Gate::swiglu_oai)
      .value("swiglu_clamped", Gate::swiglu_clamped);
  nb::enum_<Form> forms(m, "Form");
#define HEADRACE_DEFINE(name) forms.value(#name, Form::name);
  HEADRACE_FORMS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
  nb::enum_<Number> numbers(m, "Number");
#define HEADRACE_DEFINE(name) numbers.value(#name, Number::name);
  HEADRACE_NUMBERS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
  nb::enum_<Subs> subs(m, "Subs");
#define HEADRACE_DEFINE(name) subs.value(#name, Subs::name);
  HEADRACE_SUBS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
  nb::enum_<Offset> offsets(m, "Offset");
#define HEADRACE_DEFINE(name) offsets.value(#name, Offset::name);
  HEADRACE_OFFSETS(HEADRACE_DEFINE)
#undef HEADRACE_DEFINE
  nb::class_<Scaling>(m, "Scaling")
      .def("__init__", make_scaling, "number"_a, "offset"_a, named, "subs"_a, "block"_a, "group"_a, "run"_a);
  nb::class_<Matrix>(m, "Matrix")
      .def("__init__", make_matrix, "form"_a, "weight"_a, "scales"_a, "bias"_a, named, "inputs"_a, "outputs"_a, "gated"_a,
           "scaling"_a, "order"_a)
      .def("adapted", matrix_adapted, "numbers"_a, "down"_a, "up"_a, named, "count"_a)
      .def_static("of_parts", matrix_of_parts, "parts"_a, "bias"_a, named, "inputs"_a, "outputs"_a);
}

}  // namespace headrace
