// Fused attention (flash, memory-efficient, cuDNN) with dropout and gradients, in float32; flash also by documents.
// Shapes: query (batch, heads, length, head_dim); key and value may have fewer heads (grouped queries).
#include <torch/library.h>

#include <cmath>
#include <cstring>

#include "bridge.h"

namespace {

using namespace emu;
using c10::SymInt;

struct Options {
  MaybeTensor bias;
  double dropout;
  bool causal;
  double scale;
  uint64_t seed;  // of the dropout
  int64_t before = -1, after = -1;  // keys that a query sees before and after its own place; -1: all
};

struct Inputs {  // float32, on the host, key and value repeated to the query's heads
  Tensor query, key, value;
};

Tensor with_heads(const Tensor& tensor, int64_t heads) {
  return tensor.size(1) == heads ? tensor : tensor.repeat_interleave(heads / tensor.size(1), 1);
}
Tensor summed_to_heads(const Tensor& grad, int64_t heads) {
  return grad.size(1) == heads ? grad : grad.unflatten(1, {heads, grad.size(1) / heads}).sum(2);
}
Inputs inputs_of(const Tensor& query, const Tensor& key, const Tensor& value) {
  int64_t heads = query.size(1);
  return {float_on_host(query), with_heads(float_on_host(key), heads), with_heads(float_on_host(value), heads)};
}
double scale_of(const std::optional<double>& scale, const Tensor& query) {
  return scale ? *scale : 1 / std::sqrt(static_cast<double>(query.size(-1)));
}

struct Weights {
  Tensor softmax, dropped, log_sum_exp, kept;  // kept: undefined without dropout
};
// `log_sum_exp`: the forward's, if there was one.
Weights weights_of(const Inputs& in, const Options& options, const Tensor& log_sum_exp = {}) {
  Tensor scores = at::matmul(in.query, in.key.transpose(-2, -1)) * options.scale;
  if (has(options.bias)) scores = scores + float_on_host(*options.bias);
  if (options.causal) {
    Tensor later = at::ones({in.query.size(-2), in.key.size(-2)}, at::kBool).tril().logical_not();
    scores = scores.masked_fill(later, -INFINITY);
  }
  if (options.before >= 0 || options.after >= 0) {
    Tensor ahead = at::arange(scores.size(-1)) - at::arange(scores.size(-2)).unsqueeze(1);
    if (options.before >= 0) scores = scores.masked_fill(ahead < -options.before, -INFINITY);
    if (options.after >= 0) scores = scores.masked_fill(ahead > options.after, -INFINITY);
  }
  Weights result;
  result.log_sum_exp = log_sum_exp.defined() ? log_sum_exp : at::logsumexp(scores, -1);
  result.softmax = log_sum_exp.defined() ? at::exp(scores - log_sum_exp.unsqueeze(-1)) : at::softmax(scores, -1);
  result.dropped = result.softmax;
  if (options.dropout > 0) {
    SeededCpu seeded(options.seed);
    double keep = 1 - options.dropout;
    result.kept = at::bernoulli(at::full_like(scores, keep)) / keep;
    result.dropped = result.softmax * result.kept;
  }
  return result;
}

// Fused attention's results lie as (batch, length, heads, head_dim).
Tensor laid_out(const Tensor& result, const Tensor& like) {
  Tensor out = at::empty({result.size(0), result.size(2), result.size(1), result.size(3)}, like.options());
  out = out.transpose(1, 2);
  on_host(out).copy_(result);
  return out;
}

struct Forward {
  Tensor out, log_sum_exp;
  uint64_t seed;
};
Forward forward(const char* name, const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& bias,
                double dropout, bool causal, const std::optional<double>& scale) {
  Kernel kernel(name, query.device(), Kernel::PRODUCT);
  uint64_t seed = dropout > 0 ? draw_seed(std::nullopt, query.device()) : 0;
  Inputs in = inputs_of(query, key, value);
  Weights weights = weights_of(in, {bias, dropout, causal, scale_of(scale, query), seed});
  Tensor out = laid_out(at::matmul(weights.dropped, in.value), query);
  return {out, to_device(weights.log_sum_exp.contiguous(), query.device()), seed};
}

struct Backward {
  Tensor query, key, value, bias;
};
// Gradients in float32, of all the query's heads. As a card's kernels do, it takes the sums from the forward's results:
// ring attention gives those of all keys with a part of the keys.
Backward gradients_of(const Inputs& in, const Tensor& grad, const Tensor& out, const Tensor& log_sum_exp,
                      const Options& options) {
  Weights weights = weights_of(in, options, float_on_host(log_sum_exp).reshape(grad.sizes().slice(0, 3)));
  Tensor grad_value = at::matmul(weights.dropped.transpose(-2, -1), grad);
  Tensor grad_softmax = at::matmul(grad, in.value.transpose(-2, -1));
  if (weights.kept.defined()) grad_softmax = grad_softmax * weights.kept;
  const Tensor& p = weights.softmax;
  Tensor grad_scores = p * (grad_softmax - (grad * float_on_host(out)).sum(-1, true));
  Tensor grad_query = at::matmul(grad_scores, in.key) * options.scale;
  Tensor grad_key = at::matmul(grad_scores.transpose(-2, -1), in.query) * options.scale;
  return {grad_query, grad_key, grad_value, grad_scores};
}
Backward backward(const char* name, const Tensor& grad_out, const Tensor& query, const Tensor& key,
                  const Tensor& value, const Tensor& out, const Tensor& log_sum_exp, const Options& options) {
  Kernel kernel(name, query.device(), Kernel::PRODUCT);
  Backward grads = gradients_of(inputs_of(query, key, value), float_on_host(grad_out), out, log_sum_exp, options);
  Backward result;
  result.query = laid_out(grads.query, query);
  result.key = laid_out(summed_to_heads(grads.key, key.size(1)), key);
  result.value = laid_out(summed_to_heads(grads.value, value.size(1)), value);
  if (has(options.bias)) {
    Tensor grad_bias = at::sum_to(grads.bias, options.bias->sizes());
    result.bias = to_device(grad_bias.to(options.bias->scalar_type()), query.device());
  }
  return result;
}

// The seed of the dropout travels in the result that holds the generator's state.
Tensor seed_tensor(uint64_t seed, at::IntArrayRef shape, at::ScalarType type, c10::Device device) {
  Tensor host = at::zeros(shape, at::TensorOptions().dtype(type));
  std::memcpy(host.data_ptr(), &seed, sizeof seed);
  return device.is_cpu() ? host : to_device(host, device);
}
uint64_t seed_in(const Tensor& tensor) {
  uint64_t seed = 0;
  if (tensor.defined() && tensor.numel()) std::memcpy(&seed, tensor.const_data_ptr(), sizeof seed);
  return seed;
}

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

FlashResult flash(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal, bool,
                  std::optional<double> scale) {
  static const char* name = "aten::_scaled_dot_product_flash_attention";
  Recorded recorded(name);
  Forward result = forward(name, query, key, value, std::nullopt, dropout, causal, scale);
  auto device = query.device();
  return {result.out, result.log_sum_exp, Tensor(), Tensor(), query.size(2), key.size(2),
          seed_tensor(result.seed, {2}, at::kUInt64, device), seed_tensor(0, {}, at::kUInt64, device),
          at::empty({0}, query.options())};
}
Gradients flash_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                         const Tensor& out, const Tensor& log_sum_exp, const Tensor&, const Tensor&, SymInt, SymInt,
                         double dropout, bool causal, const Tensor& seed, const Tensor&, std::optional<double> scale) {
  static const char* name = "aten::_scaled_dot_product_flash_attention_backward";
  Recorded recorded(name);
  Options options{std::nullopt, dropout, causal, scale_of(scale, query), seed_in(seed)};
  Backward result = backward(name, grad, query, key, value, out, log_sum_exp, options);
  return {result.query, result.key, result.value};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const MaybeTensor& bias, bool, double dropout, bool causal,
                                                     std::optional<double> scale) {
  static const char* name = "aten::_scaled_dot_product_efficient_attention";
  Recorded recorded(name);
  Forward result = forward(name, query, key, value, bias, dropout, causal, scale);
  // This kernel keeps the generator's state on the host.
  return {result.out, result.log_sum_exp, seed_tensor(result.seed, {}, at::kLong, at::kCPU),
          seed_tensor(0, {}, at::kLong, at::kCPU)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& grad, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& bias, const Tensor& out,
                                                              const Tensor& log_sum_exp, const Tensor& seed, const Tensor&, double dropout,
                                                              std::array<bool, 4> needed, bool causal,
                                                              std::optional<double> scale) {
  static const char* name = "aten::_scaled_dot_product_efficient_attention_backward";
  Recorded recorded(name);
  if (!grad.defined()) return {};
  Options options{bias, dropout, causal, scale_of(scale, query), seed_in(seed)};
  Backward result = backward(name, grad, query, key, value, out, log_sum_exp, options);
  return {result.query, result.key, result.value, needed[3] ? result.bias : Tensor()};
}

FlashResult cudnn(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& bias, bool,
                  double dropout, bool causal, bool, std::optional<double> scale) {
  static const char* name = "aten::_scaled_dot_product_cudnn_attention";
  Recorded recorded(name);
  Forward result = forward(name, query, key, value, bias, dropout, causal, scale);
  auto device = query.device();
  return {result.out, result.log_sum_exp.unsqueeze(-1), Tensor(), Tensor(), query.size(2), key.size(2),
          seed_tensor(result.seed, {}, at::kLong, device), seed_tensor(0, {}, at::kLong, device), Tensor()};
}
Gradients cudnn_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                         const Tensor& out, const Tensor& log_sum_exp, const Tensor& seed, const Tensor&,
                         const Tensor& bias,
                         const Tensor&, const Tensor&, SymInt, SymInt, double dropout, bool causal,
                         std::optional<double> scale) {
  static const char* name = "aten::_scaled_dot_product_cudnn_attention_backward";
  Recorded recorded(name);
  Options options{bias, dropout, causal, scale_of(scale, query), seed_in(seed)};
  Backward result = backward(name, grad, query, key, value, out, log_sum_exp, options);
  return {result.query, result.key, result.value};
}

// Flash attention by documents: query (tokens, heads, head_dim), document d at the places [bounds[d], bounds[d + 1]).
// The arguments are taken by name: the schemas of torch's releases differ.
class ByDocuments {
 public:
  ByDocuments(const c10::OperatorHandle& op, torch::jit::Stack* stack) : schema_(op.schema()) {
    size_t count = schema_.arguments().size();
    given_.assign(stack->end() - count, stack->end());
    stack->resize(stack->size() - count);
    for (const char* name : {"seqused_k", "alibi_slopes", "block_table"})
      TORCH_CHECK(!schema_.argumentIndexWithName(name) || (*this)[name].isNone(), name, " is not emulated");
    TORCH_CHECK((*this)["cum_seq_q"].isTensor(), "flash attention without cum_seq_q is not emulated");
    query = tensor("query"), key = tensor("key"), value = tensor("value");
    Tensor bounds = tensor("cum_seq_q");
    TORCH_CHECK(low_precision(query), "FlashAttention only support fp16 and bf16 data type");
    TORCH_CHECK(query.dim() == 3 && query.stride(-1) == 1 && query.size(-1) % 8 == 0 && query.size(-1) <= 256);
    TORCH_CHECK(bounds.scalar_type() == at::kInt && bounds.is_cuda() && bounds.is_contiguous());
    drain_current_stream(query.device());
    Tensor places = on_host(bounds), of_keys = on_host(tensor("cum_seq_k"));
    TORCH_CHECK(at::equal(places, of_keys), "queries and keys of different documents are not emulated");
    const int32_t* place = places.const_data_ptr<int32_t>();
    bounds_.assign(place, place + places.numel());
    TORCH_CHECK(bounds_.front() == 0 && bounds_.back() == query.size(0));
    for (size_t d = 0; d + 1 < bounds_.size(); d++)
      TORCH_CHECK(bounds_[d] <= bounds_[d + 1] && bounds_[d + 1] - bounds_[d] <= (*this)["max_q"].toInt());
  }
  const c10::IValue& operator[](const char* name) const { return given_.at(*schema_.argumentIndexWithName(name)); }
  Tensor tensor(const char* name) const { return (*this)[name].toTensor(); }

  // Document d's part, as a batch of one.
  Options options(size_t d, uint64_t seed) const {
    auto scale = (*this)["scale"].toOptional<double>();
    auto window = [&](const char* name) { return (*this)[name].isNone() ? -1 : (*this)[name].toInt(); };
    return {std::nullopt, (*this)["dropout_p"].toDouble(), (*this)["is_causal"].toBool(), scale_of(scale, query),
            seed + d, window("window_size_left"), window("window_size_right")};
  }
  Tensor part(const Tensor& all, size_t d) const {
    return all.slice(0, bounds_[d], bounds_[d + 1]).transpose(0, 1).unsqueeze(0);
  }
  Tensor sums(size_t d) const { return tensor("logsumexp").slice(1, bounds_[d], bounds_[d + 1]).unsqueeze(0); }
  Inputs inputs(size_t d) const { return inputs_of(part(query, d), part(key, d), part(value, d)); }
  // Writes document d's result, (1, heads, length, head_dim), to `all`.
  void put(const Tensor& all, size_t d, const Tensor& result) const {
    on_host(all).slice(0, bounds_[d], bounds_[d + 1]).copy_(result.squeeze(0).transpose(0, 1));
  }
  size_t count() const { return bounds_.size() - 1; }

  Tensor query, key, value;

 private:
  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue> given_;
  std::vector<int64_t> bounds_;
};

void flash_by_documents(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const char* name = "aten::_flash_attention_forward";
  Recorded recorded(name);
  ByDocuments given(op, stack);
  auto device = given.query.device();
  Kernel kernel(name, device, Kernel::PRODUCT);
  uint64_t seed = given["dropout_p"].toDouble() > 0 ? draw_seed(std::nullopt, device) : 0;
  Tensor out = at::empty(given.query.sizes(), given.query.options());
  Tensor sums = at::zeros({given.query.size(1), given.query.size(0)}, at::kFloat);
  for (size_t d = 0, at = 0; d < given.count(); d++) {
    Inputs in = given.inputs(d);
    Weights weights = weights_of(in, given.options(d, seed));
    given.put(out, d, at::matmul(weights.dropped, in.value));
    int64_t length = in.query.size(2);
    sums.slice(1, at, at + length).copy_(weights.log_sum_exp.squeeze(0));
    at += length;
  }
  torch::jit::push(*stack, out, to_device(sums, device), seed_tensor(seed, {2}, at::kUInt64, device),
                   seed_tensor(0, {}, at::kUInt64, device), at::empty({0}, given.query.options()));
}

void flash_by_documents_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const char* name = "aten::_flash_attention_backward";
  Recorded recorded(name);
  ByDocuments given(op, stack);
  Kernel kernel(name, given.query.device(), Kernel::PRODUCT);
  Tensor grad = given.tensor("grad_out");
  uint64_t seed = seed_in(on_host(given.tensor("rng_state")));
  Tensor grads[] = {at::empty(given.query.sizes(), given.query.options()),
                    at::empty(given.key.sizes(), given.key.options()),
                    at::empty(given.value.sizes(), given.value.options())};
  for (size_t d = 0; d < given.count(); d++) {
    Tensor sums = given.sums(d), grad_of_part = float_on_host(given.part(grad, d));
    Backward found =
        gradients_of(given.inputs(d), grad_of_part, given.part(given.tensor("out"), d), sums, given.options(d, seed));
    given.put(grads[0], d, found.query);
    given.put(grads[1], d, summed_to_heads(found.key, given.key.size(1)));
    given.put(grads[2], d, summed_to_heads(found.value, given.value.size(1)));
  }
  torch::jit::push(*stack, grads[0], grads[1], grads[2]);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  QuietOverrides quiet;
  library.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  library.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  library.impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  library.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  library.impl("_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn));
  library.impl("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_backward));
  library.impl("_flash_attention_forward", torch::CppFunction::makeFromBoxedFunction<&flash_by_documents>());
  library.impl("_flash_attention_backward", torch::CppFunction::makeFromBoxedFunction<&flash_by_documents_backward>());
}
