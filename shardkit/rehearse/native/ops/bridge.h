// Between the devices: the emulated device's memory is host memory, so a CPU tensor can lie over a CUDA tensor's bytes.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>

#include "../core.h"
#include "record.h"

namespace emu {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline bool has(const MaybeTensor& tensor) { return tensor && tensor->defined(); }
inline bool low_precision(const Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
}

// A CPU tensor over a CUDA tensor's memory; any other tensor as it is.
Tensor on_host(const Tensor& tensor);
// The same in float32, a copy.
Tensor float_on_host(const Tensor& tensor);
// A new CUDA tensor, of the real allocator's memory, with a CPU tensor's values; any other tensor as it is.
Tensor to_device(const Tensor& tensor, c10::Device device);

// What is called in its scope reaches the CPU's kernels plainly: below autograd, autocast and modes.
class BelowAutograd {
 public:
  BelowAutograd();

 private:
  c10::impl::ExcludeDispatchKeyGuard below_;
};

// The scope of an emulated kernel: it starts when the device's current stream has run what it holds. Profilers and EMUCUDA_RECORD see it.
// In virtual time it is one kernel, or a matrix product.
class Kernel {
 public:
  enum Kind { PLAIN, SYNCHRONISES, PRODUCT };
  Kernel(const char* name, c10::Device device, Kind kind = PLAIN);
  ~Kernel();
  Kernel(const Kernel&) = delete;

 private:
  Spend computing_{COMPUTING};
  BelowAutograd below_;
  Recorded recorded_;
  const char* name_;
  c10::Device device_;
  uint32_t correlation_ = 0;
  uint64_t begin_ = 0;
};

void drain_current_stream(c10::Device device);

// A seed drawn from the CUDA generator. A kernel `moves` the generator's offset on.
uint64_t draw_seed(const std::optional<at::Generator>& generator, c10::Device device, bool moves = true);

// The CPU's default generator, seeded for one kernel and put back after it.
class SeededCpu {
 public:
  explicit SeededCpu(uint64_t seed);
  ~SeededCpu();
  SeededCpu(const SeededCpu&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> alone_;
  at::Generator generator_;
  Tensor before_;
};

std::string name_of(const c10::OperatorHandle& op);  // "aten::add.Tensor"

// Registration replaces kernels of torch on purpose; this hides the warning about it.
class QuietOverrides {
 public:
  QuietOverrides();

 private:
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Silent silent_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace emu
