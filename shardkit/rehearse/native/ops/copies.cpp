// Copies: between host and device torch's own code runs (streams, pinned memory); on the device the CPU's.
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include "bridge.h"

namespace {

using namespace emu;

Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.is_cuda() || !from.is_cuda()) return at::native::copy_(to, from, non_blocking);
  if (to.device() != from.device()) drain_current_stream(to.device());
  Kernel kernel("aten::copy_", from.device());
  on_host(to).copy_(on_host(from));
  return to;
}

void copy_each(at::TensorList to, at::TensorList from, bool non_blocking) {
  TORCH_CHECK(to.size() == from.size(), "_foreach_copy_: lists of ", to.size(), " and ", from.size(), " tensors");
  for (size_t i = 0; i < to.size(); i++) {
    Tensor target = to[i];
    target.copy_(from[i], non_blocking);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  QuietOverrides quiet;
  library.impl("copy_", TORCH_FN(copy));
  library.impl("_foreach_copy_", TORCH_FN(copy_each));
}
