// Runtime API: how many devices there are and what they look like. Sizes without a setting are an H100's.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "counters.h"
#include "errors.h"
#include "lost.h"
#include "settings.h"
#include "streams.h"

using namespace emu;

static bool exists(int device) { return device >= 0 && device < settings().devices(); }
static int bus_of(int device) { return settings().visible[device] + 1; }

EMU_EXPORT cudaError_t cudaGetDeviceCount(int* number) {
  *number = settings().devices();
  return *number ? cudaSuccess : failed(cudaErrorNoDevice);
}
EMU_EXPORT cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  current_device() = device;  // also one that is lost: the thread's choice needs nothing of it
  emucuda_touch(device);      // since CUDA 12 it makes the context
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  EMU_NEEDS(device);
  return exists(device) ? cudaSuccess : failed(cudaErrorInvalidDevice);
}
EMU_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaDeviceSynchronize(void) {
  EMU_NEEDS(current_device());
  count(Counter::device_sync);
  return synchronise_device(current_device()) ? cudaSuccess : failed(LOST);
}
EMU_EXPORT cudaError_t cudaDeviceReset(void) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = cudaDeviceMapHost;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1 << 20;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  std::snprintf(text, length, "00000000:%02X:00.0", bus_of(device));
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  int bus = 0;
  std::sscanf(text, "%*x:%x:", reinterpret_cast<unsigned*>(&bus));
  for (int each = 0; each < settings().devices(); each++)
    if (bus_of(each) == bus) {
      *device = each;
      return cudaSuccess;
    }
  return failed(cudaErrorInvalidDevice);
}

// The headers of CUDA 12 rename this to cudaGetDeviceProperties_v2, as they do for torch.
EMU_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (lost(device)) return failed(LOST);  // it makes no context
  if (!exists(device)) return failed(cudaErrorInvalidDevice);
  cudaDeviceProp p;
  std::memset(&p, 0, sizeof p);
  std::snprintf(p.name, sizeof p.name, "%s", settings().name.c_str());
  p.uuid.bytes[0] = static_cast<char>(0xE0);
  p.uuid.bytes[15] = static_cast<char>(settings().visible[device]);
  p.totalGlobalMem = settings().memory;
  p.major = settings().major;
  p.minor = settings().minor;
  p.pciBusID = bus_of(device);
  static const size_t processors = size_from_env("EMUCUDA_MULTIPROCESSORS", 132);
  p.multiProcessorCount = static_cast<int>(processors);
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  static const size_t threads = size_from_env("EMUCUDA_THREADS", 2048);
  p.maxThreadsPerMultiProcessor = static_cast<int>(threads);
  p.maxBlocksPerMultiProcessor = 32;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = 227 << 10;
  p.sharedMemPerMultiprocessor = 228 << 10;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.totalConstMem = 64 << 10;
  p.l2CacheSize = 50 << 20;
  p.memoryBusWidth = 5120;
  p.memPitch = 2147483647;
  p.textureAlignment = 512;
  p.texturePitchAlignment = 32;
  p.asyncEngineCount = 3;
  p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = p.streamPrioritiesSupported = 1;
  p.managedMemory = p.concurrentManagedAccess = p.computePreemptionSupported = p.cooperativeLaunch = 1;
  p.memoryPoolsSupported = p.hostRegisterSupported = 1;
  *found = p;
  return cudaSuccess;
}

EMU_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrClockRate: *value = 1980000; break;        // kHz
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;  // kHz
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrConcurrentKernels: case cudaDevAttrCanMapHostMemory: case cudaDevAttrHostRegisterSupported:
      *value = 1;
      break;
    default: *value = 0;  // an ability that is not emulated
  }
  return cudaSuccess;
}
