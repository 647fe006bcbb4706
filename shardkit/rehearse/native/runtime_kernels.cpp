// Runtime API: kernels. In computing mode a real launch fails and says its name, so that nothing passes uncomputed;
// in no-compute mode every launch succeeds and does nothing.
#include <algorithm>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdio>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "counters.h"
#include "errors.h"
#include "lost.h"
#include "settings.h"
#include "streams.h"

using namespace emu;

// For errors of computing mode; a CUDA torch has tens of thousands.
static std::mutex kernels_mutex;
static std::unordered_map<const void*, std::string>& kernels() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}

static std::string name_of(const void* kernel) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  auto entry = kernels().find(kernel);
  if (entry == kernels().end()) return "a kernel of a module loaded at run time";
  int status = 0;
  char* readable = abi::__cxa_demangle(entry->second.c_str(), nullptr, nullptr, &status);
  std::string name = status == 0 ? readable : entry->second;
  std::free(readable);
  return name;
}

static cudaError_t launch(const void* kernel, cudaStream_t stream) {
  count(Counter::launch);
  EMU_NEEDS(current_device());
  if (!settings().compute) {
    launched(stream_of(stream), settings().kernel_ms);
    return cudaSuccess;
  }
  std::string text = "a kernel was launched that is not emulated: " + name_of(kernel);
  std::fprintf(stderr, "[emucuda] %s\n", text.c_str());  // for callers that do not look at errors
  return failed(cudaErrorNotSupported, text);
}

// nvcc's code calls these when a library with kernels is loaded.
static void* fat_binary[1];
EMU_EXPORT void** __cudaRegisterFatBinary(void*) { return fat_binary; }
EMU_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EMU_EXPORT void __cudaUnregisterFatBinary(void**) {}
EMU_EXPORT char __cudaInitModule(void**) { return 1; }
EMU_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EMU_EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
EMU_EXPORT void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*,
                                       void*, int*) {
  // Not `settings()`: a program may choose its devices after this.
  static const bool compute = flag_from_env("EMUCUDA_COMPUTE", true);
  if (!compute) return;
  std::lock_guard<std::mutex> lock(kernels_mutex);
  kernels()[kernel] = name;
}

// <<<grid, block>>> pushes its configuration, and the kernel's host function takes it off.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Configuration> configurations;
EMU_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
EMU_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return failed(cudaErrorMissingConfiguration);
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

EMU_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return __cudaGetKernel(kernel, function);
}
EMU_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
EMU_EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
EMU_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* with, const void* kernel, void**) {
  return launch(kernel, with->stream);
}
EMU_EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t,
                                                    cudaStream_t stream) {
  return launch(kernel, stream);
}
// Constants that kernels read: none runs.
EMU_EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaMemcpyToSymbolAsync(const void*, const void*, size_t, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaSuccess;
}

// The architecture of a kernel's code: the newest that torch has code for and that the card runs. CUB knows no other.
static int compiled_for() {
  const int card = settings().major * 10 + settings().minor;
  int best = 0;
  for (int architecture : {EMU_COMPILED_FOR})
    if (architecture <= card) best = std::max(best, architecture);
  return best ? best : card;
}

EMU_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  std::memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = compiled_for();
  found->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                              unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 1;
  return cudaSuccess;
}

// Driver API: modules loaded at run time (Triton, NVRTC). Without computing, any loads.
static CUresult load(CUmodule* module) {
  *module = reinterpret_cast<CUmodule>(1);
  return settings().compute ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return load(module); }
EMU_EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) { return load(module); }
EMU_EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return load(module);
}
EMU_EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EMU_EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  *function = reinterpret_cast<CUfunction>(2);
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? 32
           : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                                  : 0;
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EMU_EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EMU_EXPORT CUresult cuLaunchKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, CUstream stream, void**, void**) {
  return static_cast<CUresult>(launch(kernel, stream));
}
EMU_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* with, CUfunction kernel, void**, void**) {
  return static_cast<CUresult>(launch(kernel, with->hStream));
}
