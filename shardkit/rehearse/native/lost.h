// A GPU that falls off the bus: from a moment that the test chooses, every call about it fails. Drivers report the
// unknown error (999) to a process that was using it, and NVML says that the GPU is lost (15).
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "account.h"

extern "C" {
int emucuda_can_be_lost(int device);    // as the program numbers it
int emucuda_lost(int device);
int emucuda_physical_lost(int number);  // as NVML numbers it
}

namespace emu {

const cudaError_t LOST = cudaErrorUnknown;

inline bool lost(int device) { return emucuda_lost(device) != 0; }

// Waits for `there`; false: the device was lost before. Nobody tells when it is, so this looks now and then.
template <class There>
bool wait_unless_lost(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, int device, There there) {
  if (!emucuda_can_be_lost(device)) {
    changed.wait(lock, there);
    return true;
  }
  while (!changed.wait_for(lock, std::chrono::milliseconds(20), there))
    if (lost(device)) return false;
  return true;
}

}  // namespace emu

// First in a function of the runtime (or the driver) that needs the device. The first call of a process that does so
// makes its context there, which takes memory of the card.
#define EMU_NEEDS(device) \
  if (emu::lost(device)) return emu::failed(emu::LOST); \
  emucuda_touch(device)
#define EMU_DRIVER_NEEDS(device) \
  if (emu::lost(device)) return CUDA_ERROR_UNKNOWN
