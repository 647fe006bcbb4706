// One kernel for nearly all operators: it hands the CPU's kernel CPU tensors over the same memory, and takes results
// back as CUDA tensors of the real allocator. What it does beside that follows what CUDA's kernels do.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <map>
#include <thread>

#include "../core.h"
#include "../settings.h"
#include "boxed.h"

namespace {

using namespace emu;

// The emulation's own: attention.cpp, norms.cpp, copies.cpp, matmul.cpp; and torch's, over emulated copies.
const Names BY_HAND = {
    "aten::_foreach_copy_", "aten::_fused_rms_norm_backward", "aten::_local_scalar_dense",
    "aten::batch_norm_backward_elemt", "aten::batch_norm_backward_reduce", "aten::batch_norm_elemt",
    "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_stats", "aten::copy_", "aten::empty.memory_format",
    "aten::empty_strided", "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::mm.dtype",
    "aten::bmm.dtype", "aten::addmm.dtype", "aten::baddbmm.dtype"};

// They take CPU tensors of any shape beside CUDA ones; the others only scalars.
const Names MIXES_DEVICES = {
    "aten::_to_copy", "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::repeat_interleave.Tensor", "aten::_pad_packed_sequence", "aten::_ctc_loss",
    "aten::_ctc_loss_backward", "aten::_fused_adam_.tensor_lr", "aten::_fused_adamw_.tensor_lr",
    "aten::tensor_split.tensor_indices_or_sections"};

Kernel::Kind kind_of(const std::string& name) {
  if (SYNCHRONISES.count(name)) return Kernel::SYNCHRONISES;
  return MATMULS.count(name) || CHOOSES_CUDNN.count(name) ? Kernel::PRODUCT : Kernel::PLAIN;
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

  Devices found = look_at(*stack, first);
  if (name.rfind("aten::_foreach_", 0) == 0 && (found.cpu_tensor || found.other)) {
    // As CUDA's kernels do with lists that are not all on one device: one operator for each item.
    return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  refuse_mixed_devices(found, name);
  if (found.other) drain_current_stream(*found.other);
  Kernel kernel(name.c_str(), *found.device, kind_of(name));
  if (MATMULS.count(name)) hold_cublas_workspace(*found.device);

  std::vector<IValue> given(stack->begin() + first, stack->end());
  Written written = compute_on_host(op, stack, found, name);
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
      return to_device(tensor, *found.device);
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
    if (WITHOUT_KERNEL.count(name) || BY_HAND.count(name)) continue;
    if (!CHOOSES_CUDNN.count(name) && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    if (!runs_on_host(*op)) {
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
