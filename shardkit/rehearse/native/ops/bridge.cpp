#include "bridge.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "../core.h"
#include "../lost.h"

namespace emu {

Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "emucuda: a tensor of layout ", tensor.layout(), " is not emulated");
  const c10::Storage& storage = tensor.storage();
  // Owns nothing: the CUDA tensor outlives the kernel.
  at::DataPtr bytes(const_cast<void*>(storage.data()), at::kCPU);
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), nullptr, false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

Tensor float_on_host(const Tensor& tensor) { return on_host(tensor).to(at::kFloat); }

Tensor to_device(const Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  Tensor plain = tensor.resolve_conj().resolve_neg();
  Tensor result = at::empty_strided(plain.sizes(), plain.strides(), plain.options().device(device).pinned_memory(false));
  if (plain.numel()) on_host(result).copy_(plain);
  return result;
}

static void* current_stream(c10::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }
void drain_current_stream(c10::Device device) { emucuda_drain(current_stream(device)); }

static c10::DispatchKeySet above_kernels() {
  using c10::DispatchKey;
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch});
}

BelowAutograd::BelowAutograd() : below_(above_kernels()) {}

Kernel::Kernel(const char* name, c10::Device device, Kind kind) : recorded_(name), name_(name), device_(device) {
  double called = emucuda_now_ms();
  drain_current_stream(device);
  emucuda_spend(current_stream(device), called, kind == PRODUCT);
  if (kind == SYNCHRONISES) emucuda_synchronise(current_stream(device));
  if (lost(device.index())) C10_CUDA_CHECK(LOST);
  emucuda_count_operator(kind == SYNCHRONISES);
  if (const Profiler* profiler = emucuda_profiler()) {
    begin_ = profiler->now();
    correlation_ = profiler->launched(ACTIVITY_KERNEL, begin_, profiler->now());
  }
}

Kernel::~Kernel() {
  const Profiler* profiler = emucuda_profiler();
  if (!profiler || !begin_) return;  // begin_: none was attached when it began
  unsigned stream = emucuda_stream_id(current_stream(device_));
  Activity done{ACTIVITY_KERNEL, name_, device_.index(), stream, 0, correlation_, begin_, profiler->now()};
  profiler->finished(&done);
}

// The finaliser of SplitMix64: neighbouring offsets give unrelated seeds.
static uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t draw_seed(const std::optional<at::Generator>& given, c10::Device device, bool moves) {
  at::Generator generator = given && given->defined() ? *given : at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  uint64_t seed = generator.current_seed(), offset = generator.get_offset();
  if (moves) generator.set_offset(offset + 4);  // a multiple of 4, as CUDA's generator demands
  return mixed(seed ^ mixed(offset));
}

static std::recursive_mutex& cpu_generator_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
SeededCpu::SeededCpu(uint64_t seed)
    : alone_(cpu_generator_mutex()), generator_(at::globalContext().defaultGenerator(at::kCPU)) {
  std::lock_guard<std::mutex> lock(generator_.mutex());
  before_ = generator_.get_state();
  generator_.set_current_seed(seed);
}
SeededCpu::~SeededCpu() {
  std::lock_guard<std::mutex> lock(generator_.mutex());
  generator_.set_state(before_);
}

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

QuietOverrides::QuietOverrides() : guard_(&silent_) {}

}  // namespace emu
