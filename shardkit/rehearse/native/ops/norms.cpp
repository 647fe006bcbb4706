// Normalisation that the CPU has no kernel for: cuDNN's batch norm, SyncBatchNorm's pieces, RMSNorm's gradient, and
// layer norm with statistics in float32 beside a half precision input.
// In float32; a batch norm's channels are dimension 1.
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include "bridge.h"

namespace {

using namespace emu;

std::vector<int64_t> all_but_channels(const Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < x.dim(); dim++)
    if (dim != 1) dims.push_back(dim);
  return dims;
}
Tensor per_channel(const Tensor& values, const Tensor& x) {  // shaped to broadcast over x
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = -1;
  return values.to(at::kFloat).reshape(shape);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(const Tensor& x, const Tensor& weight,
                                                            const MaybeTensor& bias, const MaybeTensor& mean,
                                                            const MaybeTensor& var, bool training, double momentum,
                                                            double eps) {
  auto [out, saved_mean, saved_invstd] = at::native_batch_norm(x, weight, bias, mean, var, training, momentum, eps);
  return {out, saved_mean, saved_invstd, at::empty({0}, x.options().dtype(at::kByte))};
}
std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(const Tensor& x, const Tensor& grad, const Tensor& weight,
                                                             const MaybeTensor& mean, const MaybeTensor& var,
                                                             const MaybeTensor& saved_mean,
                                                             const MaybeTensor& saved_invstd, double eps,
                                                             const Tensor&) {
  return at::native_batch_norm_backward(grad, x, weight, mean, var, saved_mean, saved_invstd, true, eps,
                                        {true, true, true});
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  Kernel kernel("aten::batch_norm_stats", input.device());
  Tensor x = float_on_host(input);
  Tensor mean = x.mean(all_but_channels(x));
  Tensor var = (x - per_channel(mean, x)).square().mean(all_but_channels(x));
  return {to_device(mean, input.device()), to_device((var + eps).rsqrt(), input.device())};
}

Tensor batch_norm_elemt(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
                        const Tensor& invstd, double) {
  Kernel kernel("aten::batch_norm_elemt", input.device());
  Tensor x = float_on_host(input);
  Tensor y = (x - per_channel(on_host(mean), x)) * per_channel(on_host(invstd), x);
  if (has(weight)) y = y * per_channel(on_host(*weight), x);
  if (has(bias)) y = y + per_channel(on_host(*bias), x);
  return to_device(y.to(input.scalar_type()), input.device());
}

// All ranks' statistics into one: mean and invstd are (ranks, channels).
std::tuple<Tensor, Tensor> batch_norm_gather_stats(const Tensor& input, const Tensor& means, const Tensor& invstds,
                                                   const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                                   double momentum, double eps, const Tensor& counts) {
  Kernel kernel("aten::batch_norm_gather_stats_with_counts", input.device());
  Tensor each_mean = float_on_host(means), each_var = float_on_host(invstds).pow(-2) - eps;
  Tensor number = float_on_host(counts).reshape({-1, 1}), total = number.sum();
  Tensor mean = (each_mean * number).sum(0) / total;
  Tensor var = ((each_var + (each_mean - mean).square()) * number).sum(0) / total;
  auto follow = [&](const MaybeTensor& running, const Tensor& now) {
    if (!has(running)) return;
    Tensor host = on_host(*running);
    host.copy_(host.to(at::kFloat) * (1 - momentum) + now * momentum);
  };
  follow(running_mean, mean);
  follow(running_var, var * (total / (total - 1)));
  return {to_device(mean, input.device()), to_device((var + eps).rsqrt(), input.device())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad_out, const Tensor& input,
                                                                      const Tensor& mean, const Tensor& invstd,
                                                                      const MaybeTensor& weight, bool, bool for_weight,
                                                                      bool for_bias) {
  auto device = input.device();
  Kernel kernel("aten::batch_norm_backward_reduce", device);
  Tensor x = float_on_host(input), grad = float_on_host(grad_out);
  Tensor sum = grad.sum(all_but_channels(x));
  Tensor sum_centred = (grad * (x - per_channel(on_host(mean), x))).sum(all_but_channels(x));
  auto type = has(weight) ? weight->scalar_type() : at::kFloat;
  Tensor grad_weight = for_weight ? to_device((sum_centred * float_on_host(invstd)).to(type), device) : Tensor();
  Tensor grad_bias = for_bias ? to_device(sum.to(type), device) : Tensor();
  return {to_device(sum, device), to_device(sum_centred, device), grad_weight, grad_bias};
}

Tensor batch_norm_backward_elemt(const Tensor& grad_out, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                                 const MaybeTensor& weight, const Tensor& sum, const Tensor& sum_centred,
                                 const Tensor& counts) {
  Kernel kernel("aten::batch_norm_backward_elemt", input.device());
  Tensor x = float_on_host(input), grad = float_on_host(grad_out), scale = float_on_host(invstd);
  Tensor total = float_on_host(counts).sum();
  Tensor centred = x - per_channel(on_host(mean), x);
  Tensor slope = per_channel(scale * scale * float_on_host(sum_centred) / total, x);
  Tensor result = (grad - per_channel(float_on_host(sum) / total, x) - centred * slope) * per_channel(scale, x);
  if (has(weight)) result = result * per_channel(on_host(*weight), x);
  return to_device(result.to(input.scalar_type()), input.device());
}

// On the host; in float32 if `low`.
MaybeTensor whole(const MaybeTensor& tensor, bool low) {
  return !has(tensor) ? tensor : MaybeTensor(low ? float_on_host(*tensor) : on_host(*tensor));
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, c10::SymIntArrayRef shape,
                                              const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  auto device = input.device();
  Kernel kernel("aten::native_layer_norm", device);
  bool low = low_precision(input);
  auto [out, mean, rstd] =
      at::native_layer_norm_symint(*whole(input, low), shape, whole(weight, low), whole(bias, low), eps);
  return {to_device(out.to(input.scalar_type()), device), to_device(mean, device), to_device(rstd, device)};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_out, const Tensor& input,
                                                       c10::SymIntArrayRef shape, const Tensor& mean,
                                                       const Tensor& rstd, const MaybeTensor& weight,
                                                       const MaybeTensor& bias, std::array<bool, 3> needed) {
  auto device = input.device();
  Kernel kernel("aten::native_layer_norm_backward", device);
  bool low = low_precision(input);
  auto [grad_input, grad_weight, grad_bias] =
      at::native_layer_norm_backward_symint(*whole(grad_out, low), *whole(input, low), shape, *whole(mean, low),
                                            *whole(rstd, low), whole(weight, low), whole(bias, low), needed);
  auto back = [&](const Tensor& tensor, at::ScalarType type) {
    return tensor.defined() ? to_device(tensor.to(type), device) : tensor;
  };
  auto weights = has(weight) ? weight->scalar_type() : input.scalar_type();
  return {back(grad_input, input.scalar_type()), back(grad_weight, weights), back(grad_bias, weights)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_out, const Tensor& input, at::IntArrayRef shape,
                                             const Tensor& rstd, const MaybeTensor& weight,
                                             std::array<bool, 2> needed) {
  auto device = input.device();
  Kernel kernel("aten::_fused_rms_norm_backward", device);
  std::vector<int64_t> outer, inner;  // dimensions
  for (int64_t dim = 0; dim < input.dim(); dim++)
    (dim < input.dim() - static_cast<int64_t>(shape.size()) ? outer : inner).push_back(dim);
  Tensor scale = float_on_host(rstd);
  Tensor normal = float_on_host(input) * scale, grad = float_on_host(grad_out);
  Tensor grad_normal = has(weight) ? grad * float_on_host(*weight) : grad;
  Tensor grad_input = scale * (grad_normal - normal * (grad_normal * normal).mean(inner, true));
  Tensor grad_weight;
  if (has(weight) && needed[1]) {
    grad_weight = grad * normal;
    if (!outer.empty()) grad_weight = grad_weight.sum(outer);
    grad_weight = to_device(grad_weight.to(weight->scalar_type()), device);
  }
  return {needed[0] ? to_device(grad_input.to(input.scalar_type()), device) : Tensor(), grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  QuietOverrides quiet;
  library.impl("cudnn_batch_norm", TORCH_FN(cudnn_batch_norm));
  library.impl("cudnn_batch_norm_backward", TORCH_FN(cudnn_batch_norm_backward));
  library.impl("batch_norm_stats", TORCH_FN(batch_norm_stats));
  library.impl("batch_norm_elemt", TORCH_FN(batch_norm_elemt));
  library.impl("batch_norm_gather_stats_with_counts", TORCH_FN(batch_norm_gather_stats));
  library.impl("batch_norm_backward_reduce", TORCH_FN(batch_norm_backward_reduce));
  library.impl("batch_norm_backward_elemt", TORCH_FN(batch_norm_backward_elemt));
  library.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
  library.impl("native_layer_norm", TORCH_FN(layer_norm));
  library.impl("native_layer_norm_backward", TORCH_FN(layer_norm_backward));
}
