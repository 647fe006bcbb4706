// Runtime API: allocation, pinned memory, pools.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "counters.h"
#include "errors.h"
#include "lost.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

using namespace emu;

static cudaError_t allocate(void** address, size_t bytes, MemoryKind kind) {
  EMU_NEEDS(current_device());
  count(Counter::malloc);
  *address = nullptr;
  if (bytes && !(*address = memory().allocate_device(current_device(), bytes, kind)))
    return failed(cudaErrorMemoryAllocation);
  if (settings().trace) std::fprintf(stderr, "[emucuda] cudaMalloc(%zu) = %p\n", bytes, *address);
  return cudaSuccess;
}

EMU_EXPORT cudaError_t cudaMalloc(void** address, size_t bytes) {
  return allocate(address, bytes, MemoryKind::device);
}
EMU_EXPORT cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned) {
  return allocate(address, bytes, MemoryKind::managed);
}
EMU_EXPORT cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  count(Counter::free);
  Block block;
  if (!memory().find(address, &block)) return failed(cudaErrorInvalidValue);
  EMU_NEEDS(block.device);
  if (!synchronise_device(block.device)) return failed(LOST);  // cudaFree waits for the device
  if (settings().trace) std::fprintf(stderr, "[emucuda] cudaFree(%p)\n", address);
  return memory().free(address, false) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
EMU_EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  EMU_NEEDS(current_device());
  *available = memory().available(current_device());
  *total = settings().memory;
  return cudaSuccess;
}

EMU_EXPORT cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned flags) {
  EMU_NEEDS(current_device());
  count(Counter::host_alloc);
  *address = nullptr;
  if (bytes && !(*address = memory().allocate_pinned(current_device(), bytes, flags)))
    return failed(cudaErrorMemoryAllocation);
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaMallocHost(void** address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
EMU_EXPORT cudaError_t cudaFreeHost(void* address) {
  if (!address) return cudaSuccess;
  count(Counter::host_free);
  synchronise_all_devices();
  return memory().free(address, true) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
EMU_EXPORT cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
  EMU_NEEDS(current_device());
  count(Counter::host_register);
  auto begin = reinterpret_cast<uintptr_t>(address);
  if (!memory().reserve_host(bytes)) return failed(cudaErrorMemoryAllocation);
  if (memory().adopt({begin, bytes, MemoryKind::registered, current_device(), flags})) return cudaSuccess;
  memory().release_host(bytes);
  return failed(cudaErrorHostMemoryAlreadyRegistered);
}
EMU_EXPORT cudaError_t cudaHostUnregister(void* address) {
  synchronise_all_devices();
  bool known = memory().forget(address, MemoryKind::registered);
  return known ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
EMU_EXPORT cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaHostGetFlags(unsigned* flags, void* address) {
  Block block;
  if (!memory().find(address, &block)) return failed(cudaErrorInvalidValue);
  *flags = block.flags;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  std::memset(found, 0, sizeof *found);
  auto* pointer = const_cast<void*>(address);
  Block block;
  if (!memory().find(address, &block)) {
    found->type = cudaMemoryTypeUnregistered;
    found->device = cudaInvalidDeviceId;
    found->hostPointer = pointer;
    return cudaSuccess;
  }
  found->device = block.device;
  found->devicePointer = pointer;
  found->type = block.kind == MemoryKind::device    ? cudaMemoryTypeDevice
                : block.kind == MemoryKind::managed ? cudaMemoryTypeManaged
                                                    : cudaMemoryTypeHost;
  if (found->type != cudaMemoryTypeDevice) found->hostPointer = pointer;
  return cudaSuccess;
}

// Pools (PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync): one for each device, which keeps nothing back.
static char pool_of_device[64];

EMU_EXPORT cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) {
  return allocate(address, bytes, MemoryKind::device);
}
EMU_EXPORT cudaError_t cudaMallocFromPoolAsync(void** address, size_t bytes, cudaMemPool_t, cudaStream_t) {
  return allocate(address, bytes, MemoryKind::device);
}
EMU_EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
EMU_EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(&pool_of_device[device]);
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) {
  return cudaDeviceGetDefaultMemPool(pool, device);
}
EMU_EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EMU_EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  int device = static_cast<int>(reinterpret_cast<char*>(pool) - pool_of_device);
  switch (attribute) {
    case cudaMemPoolAttrReservedMemHigh: case cudaMemPoolAttrUsedMemHigh:
      *static_cast<uint64_t*>(value) = memory().peak(device);
      break;
    case cudaMemPoolAttrReservedMemCurrent: case cudaMemPoolAttrUsedMemCurrent:
      *static_cast<uint64_t*>(value) = memory().used(device);
      break;
    case cudaMemPoolAttrReleaseThreshold: *static_cast<uint64_t*>(value) = 0; break;
    default: *static_cast<int*>(value) = 1;  // the reuse policies, all allowed
  }
  return cudaSuccess;
}
