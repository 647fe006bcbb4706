// Driver API: devices, contexts, pointers, and how libraries look its functions up.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>

#include "account.h"
#include "errors.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

using namespace emu;

EMU_EXPORT CUresult cuInit(unsigned) { return settings().devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
EMU_EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
static const char* error_name(CUresult error) {
  switch (error) {
    case CUDA_SUCCESS: return "CUDA_SUCCESS";
    case CUDA_ERROR_OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case CUDA_ERROR_INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case CUDA_ERROR_NOT_SUPPORTED: return "CUDA_ERROR_NOT_SUPPORTED";
    default: return "CUDA_ERROR_UNKNOWN";
  }
}
EMU_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error_name(error);
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
          : error == CUDA_ERROR_UNKNOWN     ? "unknown error"
                                            : error_name(error);
  return CUDA_SUCCESS;
}
// Messages of the driver about errors: there are none.
#if CUDA_VERSION >= 13000
EMU_EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* made) {
  if (made) *made = nullptr;
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
#endif

EMU_EXPORT CUresult cuDeviceGetCount(int* number) {
  *number = settings().devices();
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= settings().devices()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::snprintf(name, length, "%s", settings().name.c_str());
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {  // the header renames it to cuDeviceTotalMem_v2
  *bytes = settings().memory;
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; return CUDA_SUCCESS;
    default: {  // the runtime numbers the others alike
      auto same = static_cast<cudaDeviceAttr>(attribute);
      return cudaDeviceGetAttribute(value, same, device) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    }
  }
}

// A context is its device's; the address in this table tells which.
static char contexts[64];
static CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(&contexts[device]); }
EMU_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) current_device() = static_cast<int>(reinterpret_cast<char*>(context) - contexts);
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuCtxSynchronize(void) { return static_cast<CUresult>(cudaDeviceSynchronize()); }
EMU_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  // torch's guards go back to a device only if the process has a context there: else they would make one.
  *active = account().is_touched(settings().visible[device]);
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

EMU_EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  Block block;
  if (!memory().find(reinterpret_cast<void*>(pointer), &block)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = block.device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = pointer; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = block.on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}
EMU_EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* size, CUdeviceptr pointer) {
  Block block;
  if (!memory().find(reinterpret_cast<void*>(pointer), &block)) return CUDA_ERROR_INVALID_VALUE;
  if (begin) *begin = block.begin;
  if (size) *size = block.size;
  return CUDA_SUCCESS;
}

// This library exports the driver's functions too; the newest version of each comes first.
static void* driver_function(const char* name) {
  static void* self = [] {
    Dl_info found;
    dladdr(reinterpret_cast<void*>(&cuInit), &found);
    return dlopen(found.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  void* function = dlsym(self, (std::string(name) + "_v2").c_str());
  if (!function) function = dlsym(self, name);
  if (settings().trace) std::fprintf(stderr, "[emucuda] driver function %s = %p\n", name, function);
  return function;
}
static cudaError_t entry_point(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                        unsigned long long, cudaDriverEntryPointQueryResult* result) {
  return entry_point(name, function, result);
}
#if CUDART_VERSION < 13000
EMU_EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                               cudaDriverEntryPointQueryResult* result) {
  return entry_point(name, function, result);
}
#endif
EMU_EXPORT CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t,
                                     CUdriverProcAddressQueryResult* result) {  // in fact cuGetProcAddress_v2
  *function = driver_function(name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
