// No-compute mode: torch's own CUDA code runs over kernels that do nothing. Only what goes through cuDNN, which cannot
// run here, is replaced: by allocations of the same outputs, without cuDNN's workspaces.
#include <ATen/ATen.h>
#include <ATen/native/ConvUtils.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "../core.h"
#include "record.h"
#include "validity.h"

namespace {

using namespace emu;
using c10::SymInt;

// A result: memory, and nothing in it.
Tensor made(const Tensor& tensor) {
  leave(tensor);
  return tensor;
}
void product(const Tensor& of) { emucuda_gemm(c10::cuda::getCurrentCUDAStream(of.device().index()).stream()); }

Tensor convolution(const Tensor& x, const Tensor& weight, at::IntArrayRef padding, at::IntArrayRef stride,
                   at::IntArrayRef dilation, int64_t, bool, bool, bool) {
  Recorded recorded("aten::cudnn_convolution");
  auto format = at::native::cudnn_conv_suggest_memory_format(x, weight);
  Tensor copies[] = {x.contiguous(format), weight.contiguous(format)};  // held while the result is made
  auto size = at::native::conv_output_size(x.sizes(), weight.sizes(), padding, stride, dilation);
  product(x);
  return made(at::empty(size, x.options().memory_format(format)));
}

Tensor convolution_transpose(const Tensor& x, const Tensor& weight, at::IntArrayRef padding,
                             at::IntArrayRef output_padding, at::IntArrayRef stride, at::IntArrayRef dilation,
                             int64_t groups, bool, bool, bool) {
  Recorded recorded("aten::cudnn_convolution_transpose");
  auto format = at::native::cudnn_conv_suggest_memory_format(x, weight);
  Tensor copies[] = {x.contiguous(format), weight.contiguous(format)};
  auto size = at::native::conv_input_size(x.sizes(), weight.sizes(), padding, output_padding, stride, dilation, groups);
  product(x);
  return made(at::empty(size, x.options().memory_format(format)));
}

// cuDNN keeps a mean and a deviation for each channel; its reserve is empty where no activation is fused.
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const Tensor& weight, const MaybeTensor&,
                                                      const MaybeTensor& mean, const MaybeTensor& var, bool training,
                                                      double, double) {
  Recorded recorded("aten::cudnn_batch_norm");
  Tensor out = made(at::empty(x.sizes(), x.options().memory_format(x.suggest_memory_format())));
  int64_t n_saved = training ? x.size(1) : 0;
  Tensor saved_mean = made(at::empty({n_saved}, weight.options())), saved_var = made(at::empty_like(saved_mean));
  for (const MaybeTensor& statistic : {mean, var})
    if (training && has(statistic)) mark(*statistic, Validity::skipped);
  product(x);
  return {out, saved_mean, saved_var, at::empty({0}, x.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& x, const Tensor& grad_out, const Tensor& weight,
                                                       const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                                       const MaybeTensor&, double, const Tensor&) {
  Recorded recorded("aten::cudnn_batch_norm_backward");
  Tensor grad = grad_out.contiguous(x.suggest_memory_format());
  Tensor grad_x = made(at::empty(x.sizes(), x.options().memory_format(x.suggest_memory_format())));
  Tensor grad_weight = made(at::empty(weight.sizes(), weight.options())), grad_bias = made(at::empty_like(grad_weight));
  product(x);
  return {grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                                        at::OptionalIntArrayRef, at::IntArrayRef, at::IntArrayRef,
                                                        at::IntArrayRef, bool, at::IntArrayRef, int64_t,
                                                        std::array<bool, 3> needed) {
  Recorded recorded("aten::convolution_backward");
  auto format = at::native::cudnn_conv_suggest_memory_format(x, weight);
  Tensor grad = grad_out.contiguous(format), grad_x, grad_weight, grad_bias;
  if (needed[0]) {
    Tensor held = weight.contiguous(format);
    grad_x = made(at::empty(x.sizes(), x.options().memory_format(format)));
    product(x);
  }
  if (needed[1]) {
    Tensor held = x.contiguous(format);
    grad_weight = made(at::empty(weight.sizes(), weight.options().memory_format(format)));
    product(x);
  }
  if (needed[2]) {
    std::vector<int64_t> dims{0};
    for (int64_t dim = 2; dim < grad_out.dim(); dim++) dims.push_back(dim);
    grad_bias = grad_out.sum(dims);
  }
  return {grad_x, grad_weight, grad_bias};
}

// An empty tensor of `sizes` whose dimensions lie in memory in the order of `like`'s.
Tensor laid_out_like(const Tensor& like, at::IntArrayRef sizes) {
  std::vector<int64_t> order(like.dim()), strides(like.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return like.stride(a) < like.stride(b); });
  int64_t stride = 1;
  for (int64_t dim : order) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  return at::empty_strided(sizes, strides, like.options());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor&, bool log_sum_exp, double, bool,
    bool, std::optional<double>) {
  Recorded recorded("aten::_scaled_dot_product_cudnn_attention");
  Tensor out = made(laid_out_like(query, {query.size(0), query.size(1), query.size(2), value.size(3)})), sums;
  if (log_sum_exp)
    sums = made(at::empty({query.size(0), query.size(1), query.size(2), 1}, query.options().dtype(at::kFloat)));
  product(query);
  auto number = query.options().dtype(at::kLong);
  return {out, sums, Tensor(), Tensor(), query.size(2), key.size(2), at::empty({}, number), at::empty({}, number),
          Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, const Tensor& out, const Tensor&,
                                                      const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                      const Tensor&, SymInt, SymInt, double, bool,
                                                      std::optional<double>) {
  Recorded recorded("aten::_scaled_dot_product_cudnn_attention_backward");
  Tensor grads[] = {made(at::empty_like(query)), made(at::empty_like(key)), made(at::empty_like(value))};
  Tensor relaid = grad_out.strides() == out.strides() ? Tensor() : at::empty_like(out);
  product(query);
  return {grads[0], grads[1], grads[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  QuietOverrides quiet;
  library.impl("cudnn_convolution", TORCH_FN(convolution));
  library.impl("cudnn_convolution_transpose", TORCH_FN(convolution_transpose));
  library.impl("cudnn_batch_norm", TORCH_FN(batch_norm));
  library.impl("cudnn_batch_norm_backward", TORCH_FN(batch_norm_backward));
  library.impl("convolution_backward", TORCH_FN(convolution_backward));
  library.impl("_scaled_dot_product_cudnn_attention", TORCH_FN(attention));
  library.impl("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(attention_backward));
}
