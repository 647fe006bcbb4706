// Operators as the dispatcher's boxed kernels see them: arguments and results on a stack.
#pragma once
#include <unordered_set>

#include "bridge.h"

namespace emu {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using Names = std::unordered_set<std::string>;

// Operators without a kernel of their own: views and metadata, memory, choices of a kernel.
extern const Names WITHOUT_KERNEL;
// They have no CUDA kernel of their own; inside, they would choose cuDNN's for a CUDA tensor.
extern const Names CHOOSES_CUDNN;
// Their CUDA kernels wait for the device, because the result's shape depends on values.
extern const Names SYNCHRONISES;
extern const Names MATMULS;

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
inline bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

struct Devices {
  std::optional<c10::Device> device, other;
  bool cpu_tensor = false, low = false;
  std::optional<at::Generator> generator;
};

// Whether the CPU can run it.
bool runs_on_host(const OperatorHandle& op);

// The device that an operator runs on, and what of its arguments lies elsewhere.
Devices look_at(const Stack& stack, size_t first);

// Each tensor that a kernel writes: the CUDA tensor, and the CPU's over the same bytes.
using Written = std::vector<std::pair<Tensor, Tensor>>;
// Replaces the arguments on the stack by the CPU's view of them and runs the CPU's kernel; its results are on the stack.
// `moves_generator`: random numbers move the CUDA generator on.
Written compute_on_host(const OperatorHandle& op, Stack* stack, const Devices& found, const std::string& name,
                        bool moves_generator = true);

}  // namespace emu
