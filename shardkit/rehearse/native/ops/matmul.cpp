// Matrix products of half precision with a float32 result: the CPU has none.
#include <torch/library.h>

#include "bridge.h"

namespace {

using namespace emu;

Tensor product(const Tensor& left, const Tensor& right, at::ScalarType type) {
  Kernel kernel("aten::mm.dtype", left.device(), Kernel::PRODUCT);
  return to_device(at::matmul(float_on_host(left), float_on_host(right)).to(type), left.device());
}

Tensor product_added(const Tensor& to, const Tensor& left, const Tensor& right, at::ScalarType type,
                     const at::Scalar& beta, const at::Scalar& alpha) {
  Kernel kernel("aten::addmm.dtype", left.device(), Kernel::PRODUCT);
  Tensor sum = float_on_host(to) * beta + at::matmul(float_on_host(left), float_on_host(right)) * alpha;
  return to_device(sum.to(type), left.device());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  QuietOverrides quiet;
  library.impl("mm.dtype", TORCH_FN(product));
  library.impl("bmm.dtype", TORCH_FN(product));
  library.impl("addmm.dtype", TORCH_FN(product_added));
  library.impl("baddbmm.dtype", TORCH_FN(product_added));
}
