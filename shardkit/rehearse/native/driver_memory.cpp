// Driver API: virtual memory, as expandable segments use it. A physical allocation is an anonymous file, so that it can
// be mapped at a reserved address and exported as a file descriptor.
#include <cuda.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "counters.h"
#include "lost.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

using namespace emu;

static const size_t PAGE = 2 << 20;

struct Physical {
  int file;
  size_t size;
  int device;
  bool imported;  // its memory is counted where it was made
  std::atomic<int> references{1};
};

static void dropped(Physical* physical) {
  if (--physical->references) return;
  if (!physical->imported) memory().release(physical->device, physical->size);
  close(physical->file);
  delete physical;
}

struct Mapping {
  size_t size;
  Physical* physical;
};
static std::mutex mappings_mutex;
static std::map<uintptr_t, Mapping>& mappings() {
  static auto* all = new std::map<uintptr_t, Mapping>;
  return *all;
}
static void* address_of(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }
static Physical* physical_of(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Physical*>(handle); }
static CUmemGenericAllocationHandle handle_of(Physical* physical) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(physical);
}

EMU_EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                                  CUmemAllocationGranularity_flags) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  // One page more than asked, of which what lies outside the aligned part goes back at once.
  void* found = mmap(nullptr, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  auto begin = reinterpret_cast<uintptr_t>(found), aligned = round_up(begin, PAGE);
  if (aligned > begin) munmap(found, aligned - begin);
  if (begin + PAGE > aligned) munmap(address_of(aligned + size), begin + PAGE - aligned);
  *pointer = aligned;
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  munmap(address_of(pointer), size);
  return CUDA_SUCCESS;
}

EMU_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* wanted,
                                unsigned long long) {
  count(Counter::mem_create);
  int device = wanted->location.id;
  EMU_DRIVER_NEEDS(device);
  if (!memory().reserve(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = memfd_create("emucuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size))) {
    if (file >= 0) close(file);
    memory().release(device, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  auto* physical = new Physical{file, size, device, false};
  if (settings().poison) {
    void* page = mmap(nullptr, size, PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) {
      dropped(physical);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    std::memset(page, 0xFF, size);
    munmap(page, size);
  }
  *handle = handle_of(physical);
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  count(Counter::mem_release);
  dropped(physical_of(handle));
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                             unsigned long long) {
  count(Counter::mem_map);
  Physical* physical = physical_of(handle);
  EMU_DRIVER_NEEDS(physical->device);
  void* at = mmap(address_of(pointer), size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->file,
                  static_cast<off_t>(offset));
  if (at == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  if (!memory().adopt({static_cast<uintptr_t>(pointer), size, MemoryKind::device, physical->device, 0}))
    return CUDA_ERROR_ALREADY_MAPPED;
  physical->references++;
  std::lock_guard<std::mutex> lock(mappings_mutex);
  mappings()[pointer] = {size, physical};
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc*, size_t) {
  return mprotect(address_of(pointer), size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  count(Counter::mem_unmap);
  synchronise_all_devices();
  std::lock_guard<std::mutex> lock(mappings_mutex);
  auto entry = mappings().lower_bound(pointer);
  while (entry != mappings().end() && entry->first < pointer + size) {
    memory().forget(address_of(entry->first), MemoryKind::device);
    dropped(entry->second.physical);
    entry = mappings().erase(entry);
  }
  // The address stays reserved.
  void* at = mmap(address_of(pointer), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EMU_EXPORT CUresult cuMemExportToShareableHandle(void* shared, CUmemGenericAllocationHandle handle,
                                                 CUmemAllocationHandleType, unsigned long long) {
  int file = dup(physical_of(handle)->file);
  if (file < 0) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(shared) = file;
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared,
                                                   CUmemAllocationHandleType) {
  int file = dup(static_cast<int>(reinterpret_cast<intptr_t>(shared)));
  struct stat about;
  if (file < 0 || fstat(file, &about)) return CUDA_ERROR_INVALID_VALUE;
  *handle = handle_of(new Physical{file, static_cast<size_t>(about.st_size), current_device(), true});
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  std::lock_guard<std::mutex> lock(mappings_mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto entry = mappings().upper_bound(at);
  if (entry == mappings().begin() || at >= std::prev(entry)->first + std::prev(entry)->second.size)
    return CUDA_ERROR_INVALID_VALUE;
  Physical* physical = std::prev(entry)->second.physical;
  physical->references++;
  *handle = handle_of(physical);
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* found,
                                                           CUmemGenericAllocationHandle handle) {
  std::memset(found, 0, sizeof *found);
  found->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  found->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  found->location.id = physical_of(handle)->device;
  found->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return CUDA_SUCCESS;
}

EMU_EXPORT CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned value, size_t number, CUstream stream) {
  EMU_DRIVER_NEEDS(stream_of(stream)->device);
  count(Counter::memset);
  launched(stream_of(stream), settings().kernel_ms);
  stream_of(stream)->drain();
  std::fill_n(static_cast<unsigned*>(address_of(pointer)), number, value);
  return CUDA_SUCCESS;
}
EMU_EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr pointer, cuuint32_t value, unsigned) {
  EMU_DRIVER_NEEDS(stream_of(stream)->device);
  stream_of(stream)->enqueue([=] { *static_cast<volatile cuuint32_t*>(address_of(pointer)) = value; });
  return CUDA_SUCCESS;
}
// cuda.h gives it another name. torch before 2.9 looks it up by this one.
#ifdef cuStreamWriteValue32
#undef cuStreamWriteValue32
EMU_EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr pointer, cuuint32_t value, unsigned flags) {
  return cuStreamWriteValue32_v2(stream, pointer, value, flags);
}
#endif
