// One kernel for nearly all operators: it hands the CPU's kernel CPU tensors over the same memory, and takes results
// back as CUDA tensors of the real allocator. What it does beside that follows what CUDA's kernels do.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <map>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "../core.h"
#include "../settings.h"
#include "bridge.h"

namespace {

using namespace emu;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using Names = std::unordered_set<std::string>;

// ---- which operators

// No kernel runs in them, or they are the emulation's own (attention.cpp, norms.cpp, copies.cpp, matmul.cpp).
const Names KEPT = {
    "aten::_conj", "aten::_cudnn_init_dropout_state", "aten::_efficientzerotensor", "aten::_foreach_copy_",
    "aten::_fused_rms_norm_backward", "aten::_fused_sdp_choice", "aten::_lazy_clone", "aten::_local_scalar_dense",
    "aten::_neg_view", "aten::_nested_view_from_buffer", "aten::_nested_view_from_buffer_copy", "aten::_pin_memory",
    "aten::_reshape_alias", "aten::_resize_output_", "aten::_unsafe_view", "aten::alias", "aten::as_strided",
    "aten::batch_norm_backward_elemt", "aten::batch_norm_backward_reduce", "aten::batch_norm_elemt",
    "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_stats", "aten::copy_",
    "aten::empty.memory_format", "aten::empty_strided", "aten::is_pinned", "aten::is_set_to", "aten::record_stream",
    "aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::unfold", "aten::view",
    "aten::view.dtype", "aten::view_as_complex", "aten::view_as_real",
    "aten::mm.dtype", "aten::bmm.dtype", "aten::addmm.dtype", "aten::baddbmm.dtype"};

// They have no CUDA kernel of their own; inside, they would choose cuDNN's for a CUDA tensor.
const Names CHOOSES_CUDNN = {"aten::convolution", "aten::convolution_backward"};

// They take CPU tensors of any shape beside CUDA ones; the others only scalars.
const Names MIXES_DEVICES = {
    "aten::_to_copy", "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::repeat_interleave.Tensor", "aten::_pad_packed_sequence", "aten::_ctc_loss",
    "aten::_ctc_loss_backward", "aten::_fused_adam_.tensor_lr", "aten::_fused_adamw_.tensor_lr",
    "aten::tensor_split.tensor_indices_or_sections"};

// Their CUDA kernels wait for the device, because the result's shape depends on values.
const Names SYNCHRONISES = {"aten::nonzero",     "aten::masked_select",      "aten::_unique2",
                            "aten::unique_dim",  "aten::unique_consecutive", "aten::bincount",
                            "aten::repeat_interleave.Tensor"};

const Names MATMULS = {
    "aten::mm", "aten::mm.out", "aten::addmm", "aten::addmm.out", "aten::addmm_", "aten::bmm", "aten::bmm.out",
    "aten::baddbmm", "aten::baddbmm.out", "aten::baddbmm_", "aten::addmv", "aten::addmv.out", "aten::dot",
    "aten::_addmm_activation", "aten::_addmm_activation.out", "aten::_scaled_mm"};

Kernel::Kind kind_of(const std::string& name) {
  if (SYNCHRONISES.count(name)) return Kernel::SYNCHRONISES;
  return MATMULS.count(name) || CHOOSES_CUDNN.count(name) ? Kernel::PRODUCT : Kernel::PLAIN;
}

bool sums_in_float32(const std::string& name) {  // as tensor cores do; the CPU's kernels would be slow as well
  return (MATMULS.count(name) && name != "aten::_scaled_mm") || CHOOSES_CUDNN.count(name);
}

// cuBLAS takes a workspace from the caching allocator for each thread's handle and stream, and keeps it.
void hold_cublas_workspace(c10::Device device) {
  static const size_t bytes = size_from_env("EMUCUDA_WORKSPACE", 32 << 20);
  using Key = std::tuple<int, void*, std::thread::id>;
  static auto* held = new std::map<Key, Tensor>;
  static std::mutex mutex;
  if (!bytes) return;
  Key key{device.index(), c10::cuda::getCurrentCUDAStream(device.index()).stream(), std::this_thread::get_id()};
  std::lock_guard<std::mutex> lock(mutex);
  if (!held->count(key))
    (*held)[key] = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
}

// ---- arguments on the stack

template <class Function>
void each_tensor(const IValue& value, Function&& look) {
  if (value.isTensor()) {
    look(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) look(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const MaybeTensor& tensor : value.toOptionalTensorVector())
      if (tensor) look(*tensor);
  }
}
template <class Function>
void replace_tensors(IValue& value, Function&& with) {
  if (value.isTensor()) {
    value = with(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(with(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<MaybeTensor> list;
    for (const MaybeTensor& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? MaybeTensor(with(*tensor)) : MaybeTensor());
    value = list;
  }
}
bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

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
    if (text.find("not implemented for") == std::string::npos && text.find("not supported") == std::string::npos) throw;
    stack->resize(first);
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    run_in_float32(op, stack);
  }
}

// ---- the kernel

struct Devices {
  std::optional<c10::Device> device, other;
  bool cpu_tensor = false, low = false;
  std::optional<at::Generator> generator;
};

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

void refuse_mixed_devices(const Devices& found, const std::string& name) {
  if (MIXES_DEVICES.count(name)) return;
  const char* text = "Expected all tensors to be on the same device, but found at least two devices, ";
  TORCH_CHECK(!found.other, text, *found.device, " and ", *found.other, "! (", name, ")");
  TORCH_CHECK(!found.cpu_tensor, text, *found.device, " and cpu! (", name, ")");
}

void emulated(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t first = stack->size() - schema.arguments().size();
  std::string name = name_of(op);
  static const bool tracing = flag_from_env("EMUCUDA_TRACE_OPS");
  if (tracing) std::fprintf(stderr, "[emucuda] operator %s\n", name.c_str());

  Devices found = look_at(*stack, first);
  if (name.rfind("aten::_foreach_", 0) == 0 && (found.cpu_tensor || found.other)) {
    // As CUDA's kernels do with lists that are not all on one device: one operator for each item.
    return run_on_cpu(op, stack);
  }
  refuse_mixed_devices(found, name);
  if (found.other) drain_current_stream(*found.other);
  Kernel kernel(name.c_str(), *found.device, kind_of(name));
  if (MATMULS.count(name)) hold_cublas_workspace(*found.device);

  // Arguments to the host.
  std::vector<IValue> given(stack->begin() + first, stack->end());
  std::vector<std::pair<Tensor, Tensor>> written;  // (the CUDA tensor, what the CPU's kernel writes)
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

  {
    std::optional<SeededCpu> seeded;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) seeded.emplace(draw_seed(found.generator, *found.device));
    if (found.low)
      run_in_low_precision(op, stack);
    else
      run_on_cpu(op, stack);
  }

  // Results to the device.
  for (auto& [device, host] : written) {
    if (!device.numel() && host.numel()) {
      device.resize_(host.sizes());
      on_host(device).copy_(host);
    } else if (device.sizes() != host.sizes()) {
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }
  size_t results = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) {
    IValue& value = (*stack)[results + i];
    const auto* returned = schema.returns()[i].alias_info();
    if (returned && returned->isWrite()) {  // the argument itself
      for (size_t j = 0; j < given.size(); j++) {
        const auto* argument = schema.arguments()[j].alias_info();
        if (argument && *argument == *returned) value = given[j];
      }
      continue;
    }
    replace_tensors(value, [&](const Tensor& tensor) {
      for (auto& [device, host] : written)
        if (host.is_same(tensor)) return device;
      return to_device(result_type && tensor.defined() ? tensor.to(*result_type) : tensor, *found.device);
    });
  }
}

std::vector<std::string>& without_cpu_kernel() {
  static auto* names = new std::vector<std::string>;
  return *names;
}
std::vector<std::string>& replaced() {
  static auto* names = new std::vector<std::string>;
  return *names;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  QuietOverrides quiet;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& operator_name : dispatcher.getAllOpNames()) {
    if (operator_name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(operator_name);
    if (!op || !op->hasSchema()) continue;
    std::string name = name_of(*op);
    if (KEPT.count(name)) continue;
    if (!CHOOSES_CUDNN.count(name) && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    using c10::DispatchKey;
    bool runs_on_cpu = false;
    for (auto key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd,
                     DispatchKey::CompositeExplicitAutogradNonFunctional, DispatchKey::CompositeImplicitAutograd})
      runs_on_cpu |= op->hasKernelForDispatchKey(key);
    if (!runs_on_cpu) {
      without_cpu_kernel().push_back(name);
      continue;
    }
    library.impl(name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&emulated>());
    replaced().push_back(name);
  }
}

// For the tests: space-separated names.
static const char* joined(const std::vector<std::string>& names, std::string& into) {
  into.clear();
  for (const auto& name : names) into += name + " ";
  return into.c_str();
}
EMU_EXPORT const char* emucuda_replaced_operators(void) {
  static std::string text;
  return joined(replaced(), text);
}
EMU_EXPORT const char* emucuda_operators_without_cpu_kernel(void) {
  static std::string text;
  return joined(without_cpu_kernel(), text);
}
