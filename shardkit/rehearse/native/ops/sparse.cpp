// No-compute mode: how many rows a sparse gradient has, which torch's CUDA code would ask of kernels that do nothing.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../core.h"
#include "record.h"
#include "validity.h"

namespace {

using namespace emu;

// Each place that a tensor has values for, once, in order: a row of the result for each of its sparse dimensions.
Tensor distinct(const Tensor& indices, at::IntArrayRef sizes) {
  Spend computing(COMPUTING);
  BelowAutograd below;
  drain_current_stream(indices.device());
  Tensor held = on_host(indices), places = at::zeros({indices.size(1)}, at::kLong);
  for (int64_t dim = 0; dim < indices.size(0); dim++) places = places.mul(sizes[dim]).add(held[dim]);
  places = std::get<0>(at::_unique2(places));
  Tensor rows = at::empty({indices.size(0), places.numel()}, at::kLong);
  for (int64_t dim = indices.size(0) - 1; dim >= 0; dim--) {
    rows[dim].copy_(places.remainder(sizes[dim]));
    places = places.div(sizes[dim], "floor");
  }
  return to_device(rows, indices.device());
}

Tensor coalesce(const Tensor& self) {
  Recorded recorded("aten::_coalesce");
  Tensor indices = self._indices(), values = self._values();
  TORCH_CHECK(validity(indices) == Validity::computed && is_small(indices),
              "emucuda: aten::_coalesce reads values that were not computed");
  // What torch holds meanwhile: the places in a row, their order, and where each begins.
  Tensor scratch = at::empty({3, indices.size(1)}, indices.options());
  Tensor rows = distinct(indices, self.sizes());
  mark(rows, Validity::computed);
  std::vector<int64_t> shape = values.sizes().vec();
  shape[0] = rows.size(1);
  Tensor sums = at::empty(shape, values.options());
  leave(sums);
  Tensor made = at::_sparse_coo_tensor_unsafe(rows, sums, self.sizes(), values.options().layout(at::kSparse));
  return made._coalesced_(true);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  QuietOverrides quiet;
  library.impl("_coalesce", TORCH_FN(coalesce));
}
