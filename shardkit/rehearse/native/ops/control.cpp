// No-compute mode: torch's CUDA kernels are called and do nothing; then the CPU computes what a program may read back
// and decide by, over the same bytes. That is: small tensors, and integers and booleans up to some size, as long as all
// that they depend on was computed. A tiny float that depends on skipped data is one; an index that does (a router's)
// goes round; other integers are unknown, and reading them fails.
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>
#include <torch/version.h>

#include <cmath>
#include <cstring>
#include <unordered_map>

#include "../core.h"
#include "assumptions.h"
#include "boxed.h"
#include "record.h"
#include "validity.h"

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
namespace emu {
struct KernelTable;
}
// Before 2.9 torch gives nobody an operator's kernel. A typed handle may look into the table of an operator.
template <>
class c10::TypedOperatorHandle<emu::KernelTable> {
 public:
  static KernelFunction at(const OperatorHandle& op, DispatchKey key) {
    return op.operatorDef_->op.lookup(DispatchKeySet(key));
  }
};
#endif

namespace {

using namespace emu;

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
using TorchKernel = c10::KernelFunction;
TorchKernel cuda_kernel(const OperatorHandle& op) {
  return c10::TypedOperatorHandle<KernelTable>::at(op, c10::DispatchKey::CUDA);
}
// Not boxed: the boxes of these releases hold no uint64 above int64's largest.
at::Scalar scalar_of(const TorchKernel& kernel, const OperatorHandle& op, c10::DispatchKeySet keys, const Tensor& tensor) {
  return kernel.call<at::Scalar, const Tensor&>(op, keys, tensor);
}
#else
using TorchKernel = c10::SafeKernelFunction;
TorchKernel cuda_kernel(const OperatorHandle& op) { return op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA); }
at::Scalar scalar_of(const TorchKernel& kernel, const OperatorHandle& op, c10::DispatchKeySet keys, const Tensor& tensor) {
  Stack stack{tensor};
  kernel.callBoxed(op, keys, &stack);
  return stack.back().toScalar();
}
#endif

// They answer with positions along a dimension.
const Names CHOOSES_POSITIONS = {
    "aten::topk", "aten::topk.values", "aten::sort", "aten::sort.stable", "aten::sort.values_stable", "aten::argmax",
    "aten::argmax.out", "aten::argmin", "aten::argmin.out", "aten::max.dim", "aten::max.dim_max", "aten::min.dim",
    "aten::min.dim_min", "aten::multinomial", "aten::kthvalue"};
// no_compute.cpp has them: they would go through cuDNN.
const Names BY_HAND = {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::convolution_backward",
                       "aten::cudnn_batch_norm", "aten::cudnn_batch_norm_backward",
                       "aten::_scaled_dot_product_cudnn_attention",
                       "aten::_scaled_dot_product_cudnn_attention_backward"};
// They choose a kernel by shapes, types and lengths on the CPU, and read nothing that lies on a card.
const Names CHOOSE_KERNELS = {"aten::_use_cudnn_ctc_loss", "aten::_use_cudnn_ctc_loss.Tensor",
                              "aten::_use_miopen_ctc_loss", "aten::_use_miopen_ctc_loss.Tensor"};
// What they keep for backward has another shape than the CPU's.
const Names KEEP_OTHER_BUFFERS = {"aten::log_sigmoid_forward", "aten::log_sigmoid_forward.output",
                                  "aten::log_sigmoid_backward", "aten::log_sigmoid_backward.grad_input"};
// They write their first argument and do not read it.
const Names OVERWRITES = {"aten::copy_",         "aten::fill_.Scalar",  "aten::fill_.Tensor", "aten::zero_",
                          "aten::_foreach_copy_", "aten::_foreach_zero_", "aten::uniform_",     "aten::normal_",
                          "aten::random_",        "aten::random_.to",     "aten::random_.from", "aten::exponential_",
                          "aten::bernoulli_.float", "aten::bernoulli_.Tensor"};
const Names ZEROES = {"aten::zero_", "aten::_foreach_zero_"};
// Memory that nothing has written yet.
const Names EMPTY = {"aten::empty.memory_format", "aten::empty_strided"};

// torch's own kernel: the program's time, as on a GPU.
void call_kernel(const TorchKernel& kernel, const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  Spend program(PROGRAM);
  try {
    kernel.callBoxed(op, keys, stack);
  } catch (const c10::Error& error) {
    TORCH_CHECK(!std::strstr(error.what(), "CUDNN_STATUS_NOT_INITIALIZED"), "emucuda: ", op.operator_name().name,
                " runs in cuDNN, which is not emulated");
    throw;
  }
}

struct CudaKernel {
  TorchKernel kernel;
  std::string name;
  bool runs_on_host, answers_with_a_value;
};
std::unordered_map<c10::OperatorName, CudaKernel>& kernels() {
  static auto* held = new std::unordered_map<c10::OperatorName, CudaKernel>;
  return *held;
}

struct Operands {
  bool all_small = true, all_tiny = true;
  Validity read = Validity::computed;
  std::vector<Tensor> written, updated;  // by the kernel; those that it reads too
  std::vector<Tensor> unknown;           // that it reads
};

Operands operands(const c10::FunctionSchema& schema, const std::vector<IValue>& given, bool overwrites) {
  Operands found;
  for (size_t i = 0; i < given.size(); i++) {
    const auto& argument = schema.arguments()[i];
    bool is_output = argument.is_out() || (overwrites && i == 0);
    each_tensor(given[i], [&](const Tensor& tensor) {
      if (!tensor.defined() || (!tensor.is_cuda() && tensor.dim() == 0)) return;
      see_type(static_cast<int>(tensor.scalar_type()));
      found.all_small &= tensor.is_cuda() && is_small(tensor);
      found.all_tiny &= is_tiny(tensor);
      if (is_written(argument)) (is_output ? found.written : found.updated).push_back(tensor);
      if (is_output) return;
      Validity read = validity(tensor);
      found.read = std::max(found.read, read);
      if (read != Validity::computed) found.unknown.push_back(tensor);
    });
  }
  return found;
}

// The same, of a program that will read what these become: once the stream is there, as ranks may have sent some of it.
Operands arrived(const c10::FunctionSchema& schema, const std::vector<IValue>& given, bool overwrites, Operands found,
                 unsigned arrivals_before) {
  Devices devices = look_at(given, 0);
  if (!devices.device) return found;
  drain_current_stream(*devices.device);
  return arrivals() == arrivals_before ? found : operands(schema, given, overwrites);
}

std::vector<Tensor> new_tensors(const c10::FunctionSchema& schema, const Stack& stack) {
  std::vector<Tensor> found;
  size_t first = stack.size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++)
    if (!schema.returns()[i].alias_info())
      each_tensor(stack[first + i], [&](const Tensor& tensor) {
        if (tensor.defined() && tensor.is_cuda()) found.push_back(tensor);
      });
  return found;
}

// 0, 1, 2, … round and round: as many of each, and no two alike in a row of a router's choices.
void fill_positions(const Tensor& tensor, int64_t of) {
  Spend computing(COMPUTING);
  drain_current_stream(tensor.device());
  Tensor rows = at::arange(tensor.numel(), at::kLong).remainder_(std::max<int64_t>(of, 1));
  on_host(tensor).copy_(rows.view(tensor.sizes()));
}

int64_t positions(const std::vector<IValue>& given) {  // of the dimension that is chosen from: the last, as a rule
  const Tensor& from = given[0].toTensor();
  return from.dim() ? from.size(-1) : 1;
}

// any() of what nobody computed is False, all() is True: nothing overflows, all is finite, nothing is drawn again.
bool answer_for_all(const std::string& name, const std::vector<Tensor>& answers) {
  bool any = name == "aten::any" || name.rfind("aten::any.", 0) == 0;
  if (!any && name != "aten::all" && name.rfind("aten::all.", 0) != 0) return false;
  for (const Tensor& tensor : answers) {
    if (!is_small(tensor)) return false;
    Spend computing(COMPUTING);
    drain_current_stream(tensor.device());
    on_host(tensor).fill_(any ? 0 : 1);
    mark(tensor, Validity::computed);
  }
  assume(any ? Assumption::ANY_IS_FALSE : Assumption::ALL_IS_TRUE);
  return true;
}

void skip(const CudaKernel& entry, const std::vector<IValue>& given, const std::vector<Tensor>& fresh,
          const Operands& found) {
  if (answer_for_all(entry.name, fresh.empty() ? found.written : fresh)) return;
  bool chooses = CHOOSES_POSITIONS.count(entry.name);
  if (chooses) assume(Assumption::POSITIONS_GO_ROUND);
  for (const auto* answers : {&fresh, &found.written})
    for (const Tensor& tensor : *answers) {
      bool has_positions = chooses && &tensor == &answers->back();  // the chosen values come before them
      if (!(has_positions && decides(tensor) && is_small(tensor))) {
        leave(tensor);
        continue;
      }
      fill_positions(tensor, positions(given));
      mark(tensor, Validity::computed);
    }
  for (const Tensor& tensor : found.updated) {
    if (!decides(tensor) && is_small(tensor) && validity(tensor) != Validity::skipped)
      mark(tensor, Validity::stand_in);  // with the values that it has
    else
      leave(tensor);
  }
}

// CUDA's kernel of zero_ calls fill_: either alone would touch the pages that the other spares.
bool writes_zeros(const std::string& name, const std::vector<IValue>& given) {
  if (ZEROES.count(name)) return true;
  if (name != "aten::fill_.Scalar") return false;
  at::Scalar value = given[1].toScalar();
  return !value.isComplex() && value.toDouble() == 0 && !std::signbit(value.toDouble());
}

// Zeros without touching pages; False where a tensor is not dense.
bool zeroed(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors)
    if (!tensor.is_non_overlapping_and_dense()) return false;
  for (const Tensor& tensor : tensors) {
    emucuda_zero(tensor.mutable_data_ptr(), tensor.nbytes());
    mark(tensor, Validity::computed);
  }
  return true;
}

// The CPU's results into those that CUDA's kernel has made.
void compute(const OperatorHandle& op, const CudaKernel& entry, std::vector<IValue> given,
             const std::vector<Tensor>& fresh, const Operands& found) {
  Spend computing(COMPUTING);
  BelowAutograd below;
  bool zeros = writes_zeros(entry.name, given);
  Stack stack = std::move(given);
  Devices devices = look_at(stack, 0);
  drain_current_stream(*devices.device);
  if (zeros && zeroed(found.written)) return;
  try {
    compute_on_host(op, &stack, devices, entry.name, /*moves_generator=*/false);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "emucuda: ", entry.name, ": the CPU refuses what CUDA took: ", error.what_without_backtrace());
  }
  size_t next = 0;
  for (size_t i = 0; i < op.schema().returns().size(); i++) {
    if (op.schema().returns()[i].alias_info()) continue;
    each_tensor(stack[stack.size() - op.schema().returns().size() + i], [&](const Tensor& tensor) {
      if (!tensor.defined() || next == fresh.size()) return;
      const Tensor& result = fresh[next++];
      TORCH_CHECK(result.sizes() == tensor.sizes(), "emucuda: ", entry.name, " has results of other shapes on the CPU");
      on_host(result).copy_(tensor);
    });
  }
  for (const auto* tensors : {&fresh, &found.written, &found.updated})
    for (const Tensor& tensor : *tensors) mark(tensor, found.read);
}

// The mask alone says how many values are selected.
bool select_by_mask(Stack* stack) {
  Tensor from = stack->at(stack->size() - 2).toTensor(), mask = stack->back().toTensor();
  if (validity(mask) != Validity::computed || !is_small(mask)) return false;
  Tensor selected;
  {
    Spend computing(COMPUTING);
    BelowAutograd below;
    drain_current_stream(mask.device());
    auto shape = at::infer_size(from.sizes(), mask.sizes());
    selected = at::empty({on_host(mask).expand(shape).sum().item<int64_t>()}, from.options());
  }
  leave(selected);
  torch::jit::drop(*stack, 2);
  torch::jit::push(*stack, selected);
  return true;
}

// The user's number in place of values that nobody computed: each integer is that, so many booleans (or floats that are
// asked for zero) are true, and so many values are distinct. False where the user gave the program's line none.
bool fill_as_given(const std::string& name, const std::vector<Tensor>& unknown) {
  int64_t number = unknown.empty() ? -1 : given_number();
  if (number < 0) return false;
  Spend computing(COMPUTING);
  BelowAutograd below;
  for (const Tensor& tensor : unknown) {
    drain_current_stream(tensor.device());
    Tensor at = at::arange(tensor.numel(), at::kLong), values = at.lt(number);
    if (name.find("unique") != std::string::npos)
      values = at.mul(std::min<int64_t>(number, tensor.numel())).floor_divide(std::max<int64_t>(tensor.numel(), 1));
    else if (decides(tensor) && tensor.scalar_type() != at::kBool)
      values = at.fill_(number);
    on_host(tensor).copy_(values.view(tensor.sizes()));
    mark(tensor, Validity::computed);
  }
  assume(Assumption::GIVEN);
  return true;
}

// An operator whose result's shape, or whose answer to the program, depends on values: CUDA's kernel would read nothing
// that it has computed. The CPU's does it, and its results get memory.
void compute_alone(const OperatorHandle& op, const CudaKernel& entry, Stack* stack, const Operands& found) {
  if (entry.name == "aten::equal" && !decides(stack->back().toTensor()) && found.read != Validity::computed) {
    assume(Assumption::NOT_EQUAL);
    torch::jit::drop(*stack, 2);  // training moves what it trains: no two are equal
    return torch::jit::push(*stack, false);
  }
  bool known = found.read == Validity::computed && found.all_small;
  if (entry.name == "aten::masked_select" && !known) {
    Tensor mask = stack->back().toTensor();
    if (validity(mask) != Validity::computed) fill_as_given(entry.name, {mask});
    if (select_by_mask(stack)) return;
  } else if (!known) {
    known = fill_as_given(entry.name, found.unknown);
  }
  TORCH_CHECK(known, "emucuda: ", entry.name, " reads values that were not computed");
  size_t first = stack->size() - op.schema().arguments().size();
  Devices devices = look_at(*stack, first);
  Kernel kernel(entry.name.c_str(), *devices.device, Kernel::SYNCHRONISES);
  compute_on_host(op, stack, devices, entry.name, /*moves_generator=*/false);
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
    replace_tensors((*stack)[i], [&](const Tensor& tensor) {
      Tensor made = to_device(tensor, *devices.device);
      mark(made, Validity::computed);
      return made;
    });
}

void counted(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const CudaKernel& entry = kernels().at(op.operator_name());
  const auto& schema = op.schema();
  Spend bookkeeping(BOOKKEEPING);
  Recorded recorded(entry.name);
  std::vector<IValue> given(stack->end() - schema.arguments().size(), stack->end());
  bool overwrites = OVERWRITES.count(entry.name);
  unsigned arrivals_before = arrivals();
  Operands found = operands(schema, given, overwrites);
  bool is_read = entry.answers_with_a_value || SYNCHRONISES.count(entry.name);
  if (is_read || (found.all_small && entry.runs_on_host))
    found = arrived(schema, given, overwrites, std::move(found), arrivals_before);
  if (is_read) return compute_alone(op, entry, stack, found);
  call_kernel(entry.kernel, op, keys, stack);
  std::vector<Tensor> fresh = new_tensors(schema, *stack);
  bool small = found.all_small, tiny = found.all_tiny;
  for (const auto* tensors : {&fresh, &found.written})  // the kernel may have given them their sizes
    for (const Tensor& tensor : *tensors) {
      small &= is_small(tensor);
      tiny &= is_tiny(tensor);
    }
  bool chosen_by_skipped = CHOOSES_POSITIONS.count(entry.name) && found.read != Validity::computed;
  bool known = found.read == Validity::computed || (found.read == Validity::stand_in && tiny);
  if (small && entry.runs_on_host && known && !chosen_by_skipped)
    compute(op, entry, std::move(given), fresh, found);
  else
    skip(entry, given, fresh, found);
}

void empty(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const CudaKernel& entry = kernels().at(op.operator_name());
  Spend bookkeeping(BOOKKEEPING);
  call_kernel(entry.kernel, op, keys, stack);
  // What lies there is nobody's; a tiny one may be filled by a collective, which moves bytes.
  const Tensor& made = stack->back().toTensor();
  mark(made, is_tiny(made) && !is_weights(made) ? Validity::computed : Validity::skipped);
}

void refuse_to_read(const Tensor& tensor, const std::string& name) {
  if (decides(tensor) || tensor.numel() == 1) drain_current_stream(tensor.device());
  bool unknown = decides(tensor) && validity(tensor) == Validity::skipped;
  TORCH_CHECK(!unknown || fill_as_given(name, {tensor}), "emucuda: ", name, " reads ",
              tensor.scalar_type(), " values that were not computed");
}

void assume_one(const Tensor& tensor) {
  if (validity(tensor) == Validity::stand_in) assume(Assumption::IS_ONE);
}

// What a copy between the host and a card carries. torch converts types on the side where that is cheaper, so that what
// moves is at most the larger of both.
struct Carried {
  size_t bytes;
  bool fits;  // small enough to move whatever it is
  bool decides, is_small;
};

Carried carried(const Tensor& to, const Tensor& from) {
  size_t bytes = std::max(to.nbytes(), from.nbytes());
  return {bytes, bytes <= emucuda_skip_above(), decides(from) && decides(to), is_small(from) && is_small(to)};
}

void move(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const CudaKernel& entry, size_t bytes) {
  MoveUpTo limit(std::max(bytes, emucuda_skip_above()));
  call_kernel(entry.kernel, op, keys, stack);
}

// A program may read what it gets: nothing that decides is invented, and floats that nobody computed are zeros.
void copy_to_host(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const Tensor& to,
                  const Tensor& from) {
  const CudaKernel& entry = kernels().at(op.operator_name());
  if (!is_bytes(from)) refuse_to_read(from, entry.name);
  if (is_tiny(from) && validity(from) == Validity::skipped) leave(from);  // a part of a larger tensor
  assume_one(from);
  Carried load = carried(to, from);
  bool moves = load.fits || (load.decides && load.is_small && validity(from) == Validity::computed);
  if (!load.decides && (!moves || validity(from) == Validity::skipped)) assume(Assumption::IS_ZERO);
  move(op, keys, stack, entry, moves ? load.bytes : 0);
}

// The host's bytes are true. Weights that are large stay behind, integers (token ids) go along.
void copy_to_card(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, const Tensor& to,
                  const Tensor& from) {
  Carried load = carried(to, from);
  bool moves = load.fits || (load.decides && load.is_small && !is_weights(from) && !is_weights(to));
  move(op, keys, stack, kernels().at(op.operator_name()), moves ? load.bytes : 0);
  mark(to, moves ? Validity::computed : Validity::skipped);
}

void copy(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  Tensor to = (*stack)[stack->size() - 3].toTensor(), from = (*stack)[stack->size() - 2].toTensor();
  if (from.is_cuda() && to.is_cuda()) return counted(op, keys, stack);
  Spend bookkeeping(BOOKKEEPING);
  if (to.is_cuda())
    copy_to_card(op, keys, stack, to, from);
  else
    copy_to_host(op, keys, stack, to, from);
}

at::Scalar read_scalar(c10::DispatchKeySet keys, const Tensor& tensor) {
  Spend bookkeeping(BOOKKEEPING);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_local_scalar_dense", "");
  const CudaKernel& entry = kernels().at(op.operator_name());
  refuse_to_read(tensor, entry.name);
  assume_one(tensor);
  Spend program(PROGRAM);
  return scalar_of(entry.kernel, op, keys, tensor);
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
    bool has_kernel = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (!has_kernel && name != "aten::copy_") continue;  // its kernel is for all devices
    if (WITHOUT_KERNEL.count(name) || BY_HAND.count(name) || CHOOSE_KERNELS.count(name)) continue;
    bool value = false;
    for (const auto& returned : op->schema().returns())
      value |= returned.type()->kind() == c10::TypeKind::BoolType;
    bool on_host = runs_on_host(*op) && !KEEP_OTHER_BUFFERS.count(name);
    kernels().emplace(operator_name, CudaKernel{cuda_kernel(*op), name, on_host, value});
    auto function = EMPTY.count(name)       ? torch::CppFunction::makeFromBoxedFunction<&empty>()
                    : name == "aten::copy_" ? torch::CppFunction::makeFromBoxedFunction<&copy>()
                    : name == "aten::_local_scalar_dense" ? torch::CppFunction(TORCH_FN(read_scalar))
                                                          : torch::CppFunction::makeFromBoxedFunction<&counted>();
    library.impl(name.substr(6).c_str(), std::move(function));
  }
}
