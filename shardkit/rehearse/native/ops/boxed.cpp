#include "boxed.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAFunctions.h>

namespace emu {

const Names WITHOUT_KERNEL = {
    "aten::_conj", "aten::_cudnn_init_dropout_state", "aten::_efficientzerotensor", "aten::_fused_sdp_choice",
    "aten::_lazy_clone", "aten::_neg_view", "aten::_nested_view_from_buffer", "aten::_nested_view_from_buffer_copy",
    "aten::_pin_memory", "aten::_reshape_alias", "aten::_resize_output_", "aten::_unsafe_view", "aten::alias",
    "aten::as_strided", "aten::is_pinned", "aten::is_set_to", "aten::record_stream", "aten::resize_",
    "aten::resize_as_", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor", "aten::unfold", "aten::view", "aten::view.dtype", "aten::view_as_complex",
    "aten::view_as_real"};

const Names CHOOSES_CUDNN = {"aten::convolution", "aten::convolution_backward"};

const Names SYNCHRONISES = {"aten::nonzero",     "aten::masked_select",      "aten::_unique2",
                            "aten::unique_dim",  "aten::unique_consecutive", "aten::bincount",
                            "aten::repeat_interleave.Tensor", "aten::mode"};

const Names MATMULS = {
    "aten::mm", "aten::mm.out", "aten::addmm", "aten::addmm.out", "aten::addmm_", "aten::bmm", "aten::bmm.out",
    "aten::baddbmm", "aten::baddbmm.out", "aten::baddbmm_", "aten::addmv", "aten::addmv.out", "aten::dot",
    "aten::_addmm_activation", "aten::_addmm_activation.out", "aten::_scaled_mm", "aten::_grouped_mm"};

namespace {

bool sums_in_float32(const std::string& name) {  // as tensor cores do; the CPU's kernels would be slow as well
  return (MATMULS.count(name) && name != "aten::_scaled_mm") || CHOOSES_CUDNN.count(name);
}

void run_on_cpu(const OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// Half precision by way of float32, rounded at the end.
void run_in_float32(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t first = stack->size() - schema.arguments().size();
  at::ScalarType type = at::kHalf;
  bool type_asked_for = false;
  std::vector<std::pair<Tensor, Tensor>> written;  // (given, its float32 copy)
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    IValue& value = (*stack)[first + i];
    if (argument.name() == "dtype" && !value.isNone()) type_asked_for = true;
    replace_tensors(value, [&](const Tensor& tensor) {
      if (!low_precision(tensor)) return tensor;
      type = tensor.scalar_type();
      Tensor copy = tensor.to(at::kFloat);
      if (is_written(argument)) written.emplace_back(tensor, copy);
      return copy;
    });
  }
  run_on_cpu(op, stack);
  for (auto& [given, copy] : written) {
    if (given.sizes() != copy.sizes()) given.resize_(copy.sizes());
    given.copy_(copy);
  }
  size_t results = stack->size() - schema.returns().size();
  for (size_t i = results; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().scalar_type() != at::kFloat) continue;
    Tensor result = value.toTensor();
    auto same = [&](auto& pair) { return pair.second.is_same(result); };
    auto given = std::find_if(written.begin(), written.end(), same);
    if (given != written.end())
      value = given->first;
    else if (!type_asked_for)
      value = result.to(type);
  }
}

void run_in_low_precision(const OperatorHandle& op, Stack* stack) {
  if (sums_in_float32(name_of(op))) return run_in_float32(op, stack);
  size_t first = stack->size() - op.schema().arguments().size();
  Stack arguments(stack->begin() + first, stack->end());
  try {
    run_on_cpu(op, stack);
  } catch (const c10::Error& error) {
    // The CPU has fewer kernels for half precision; only their refusals, made before they start, tell which.
    std::string text = error.what();
    bool refused = false;
    for (const char* words : {"not implemented for", "not supported", "expected scalar type"})
      refused |= text.find(words) != std::string::npos;
    if (!refused) throw;
    stack->resize(first);
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    run_in_float32(op, stack);
  }
}

// Two things that CUDA's kernels take and the CPU's do not: a softmax of half precision with a float32 result, and its
// gradient back to half precision. The second returns the type for the result.
void fit_softmax(const std::string& name, Stack* stack, size_t first, std::optional<at::ScalarType>* result) {
  bool forward = name.rfind("aten::_softmax", 0) == 0 || name.rfind("aten::_log_softmax", 0) == 0;
  if (!forward) return;
  if (name.find("_backward_data") != std::string::npos) {
    auto wanted = static_cast<at::ScalarType>((*stack)[first + 3].toInt());
    auto given = (*stack)[first].toTensor().scalar_type();
    if (given == wanted) return;
    *result = wanted;
    (*stack)[first + 3] = static_cast<int64_t>(given);
  } else if ((*stack)[first + 2].toBool()) {
    (*stack)[first] = (*stack)[first].toTensor().to(at::kFloat);
    (*stack)[first + 2] = false;
  }
}

}  // namespace

bool runs_on_host(const OperatorHandle& op) {
  using c10::DispatchKey;
  for (auto key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd,
                   DispatchKey::CompositeExplicitAutogradNonFunctional, DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

Devices look_at(const Stack& stack, size_t first) {
  Devices found;
  for (size_t i = first; i < stack.size(); i++) {
    const IValue& value = stack[i];
    each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      found.low |= low_precision(tensor);
      found.cpu_tensor |= tensor.is_cpu() && tensor.dim() > 0;
      if (!tensor.is_cuda()) return;
      if (!found.device) found.device = tensor.device();
      if (*found.device != tensor.device()) found.other = tensor.device();
    });
    if (value.isDevice() && value.toDevice().is_cuda() && !found.device) found.device = value.toDevice();
    if (value.isGenerator()) found.generator = value.toGenerator();
  }
  if (!found.device || !found.device->has_index()) found.device = c10::Device(at::kCUDA, c10::cuda::current_device());
  return found;
}

// CUDA's kernel counts integers too.
static void fit_histogram(const std::string& name, Stack* stack, size_t first, std::optional<at::ScalarType>* result) {
  if (name != "aten::histc" || !at::isIntegralType((*stack)[first].toTensor().scalar_type(), false)) return;
  *result = (*stack)[first].toTensor().scalar_type();
  (*stack)[first] = (*stack)[first].toTensor().to(at::kDouble);
}

Written compute_on_host(const OperatorHandle& op, Stack* stack, const Devices& found, const std::string& name,
                        bool moves_generator) {
  const auto& schema = op.schema();
  size_t first = stack->size() - schema.arguments().size();
  Written written;
  // Arguments to the host.
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    IValue& value = (*stack)[first + i];
    bool writes = is_written(schema.arguments()[i]);
    if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(at::kCPU);
    if (value.isGenerator()) value = IValue();  // SeededCpu stands for it
    replace_tensors(value, [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      // An empty one is an `out=` that the kernel resizes: an alias could not grow.
      Tensor host = writes && !tensor.numel()
                        ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU))
                        : on_host(tensor);
      if (writes) written.emplace_back(tensor, host);
      return host;
    });
  }
  std::optional<at::ScalarType> result_type;
  fit_softmax(name, stack, first, &result_type);
  fit_histogram(name, stack, first, &result_type);

  {
    std::optional<SeededCpu> seeded;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) 
      seeded.emplace(draw_seed(found.generator, *found.device, moves_generator));
    if (found.low)
      run_in_low_precision(op, stack);
    else
      run_on_cpu(op, stack);
  }
  if (result_type)
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
      replace_tensors((*stack)[i],
                      [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(*result_type) : tensor; });
  return written;
}

}  // namespace emu
