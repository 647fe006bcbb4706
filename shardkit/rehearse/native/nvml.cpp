// NVML: all devices, whatever CUDA_VISIBLE_DEVICES says. Load, power and temperature are made up and constant.
// Declared by hand: no wheel brings nvml.h. What is not here fails to resolve, and its caller says so.
#include <algorithm>
#include <cstdio>

#include "account.h"
#include "core.h"
#include "lost.h"
#include "settings.h"

using emu::settings;

enum Result { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
using Device = void*;  // physical number + 1

static int number_of(Device device) { return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1; }
static Result device_at(int number, Device* device) {
  if (number < 0 || number >= settings().physical) return INVALID_ARGUMENT;
  if (emucuda_physical_lost(number)) return GPU_IS_LOST;
  *device = reinterpret_cast<Device>(static_cast<intptr_t>(number) + 1);
  return SUCCESS;
}

EMU_EXPORT Result nvmlInit(void) { return SUCCESS; }
EMU_EXPORT Result nvmlInit_v2(void) { return SUCCESS; }
EMU_EXPORT Result nvmlInitWithFlags(unsigned) { return SUCCESS; }
EMU_EXPORT Result nvmlShutdown(void) { return SUCCESS; }
EMU_EXPORT const char* nvmlErrorString(Result result) {
  return result == SUCCESS ? "Success" : result == GPU_IS_LOST ? "GPU is lost" : "Not Supported";
}
EMU_EXPORT Result nvmlSystemGetDriverVersion(char* text, unsigned length) {
  std::snprintf(text, length, "580.00");
  return SUCCESS;
}
EMU_EXPORT Result nvmlSystemGetCudaDriverVersion(int* version) {
  *version = 13000;
  return SUCCESS;
}
EMU_EXPORT Result nvmlSystemGetCudaDriverVersion_v2(int* version) { return nvmlSystemGetCudaDriverVersion(version); }

EMU_EXPORT Result nvmlDeviceGetCount_v2(unsigned* number) {
  *number = static_cast<unsigned>(settings().physical);
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetCount(unsigned* number) { return nvmlDeviceGetCount_v2(number); }
EMU_EXPORT Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  return device_at(static_cast<int>(index), device);
}
EMU_EXPORT Result nvmlDeviceGetHandleByIndex(unsigned index, Device* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}
EMU_EXPORT Result nvmlDeviceGetHandleByPciBusId_v2(const char* text, Device* device) {
  unsigned bus = 0;
  std::sscanf(text, "%*x:%x:", &bus);
  return device_at(static_cast<int>(bus) - 1, device);
}
EMU_EXPORT Result nvmlDeviceGetHandleByUUID(const char* text, Device* device) {
  unsigned last = 0;
  if (std::sscanf(text, "GPU-e0000000-0000-0000-0000-%12x", &last) != 1) return INVALID_ARGUMENT;
  return device_at(static_cast<int>(last), device);
}
EMU_EXPORT Result nvmlDeviceGetIndex(Device device, unsigned* index) {
  *index = static_cast<unsigned>(number_of(device));
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetName(Device, char* text, unsigned length) {
  std::snprintf(text, length, "%s", settings().name.c_str());
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetUUID(Device device, char* text, unsigned length) {
  std::snprintf(text, length, "GPU-e0000000-0000-0000-0000-%012x", number_of(device));
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetCudaComputeCapability(Device, int* major, int* minor) {
  *major = settings().major;
  *minor = settings().minor;
  return SUCCESS;
}

struct MemoryInfo {
  unsigned long long total, free, used;
};
EMU_EXPORT Result nvmlDeviceGetMemoryInfo(Device device, MemoryInfo* info) {
  if (emucuda_physical_lost(number_of(device))) return GPU_IS_LOST;
  info->total = settings().memory;
  info->used = std::min<unsigned long long>(info->total, emucuda_card_used(number_of(device)));
  info->free = info->total - info->used;
  return SUCCESS;
}
struct MemoryInfo2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
EMU_EXPORT Result nvmlDeviceGetMemoryInfo_v2(Device device, MemoryInfo2* info) {
  MemoryInfo plain;
  if (Result result = nvmlDeviceGetMemoryInfo(device, &plain)) return result;
  info->total = plain.total;
  info->reserved = 0;
  info->free = plain.free;
  info->used = plain.used;
  return SUCCESS;
}
// Entries of the first version end after `used`.
struct Process1 {
  unsigned pid;
  unsigned long long used;
};
struct Process {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
template <class Entry>
static Result running_processes(Device device, unsigned* number, Entry* entries) {
  if (emucuda_physical_lost(number_of(device))) return GPU_IS_LOST;
  unsigned room = *number, pid = 0;
  *number = 0;
  while (size_t bytes = emucuda_card_held(number_of(device), static_cast<int>(*number), &pid)) {
    if (*number < room) {
      std::memset(&entries[*number], 0xFF, sizeof(Entry));  // no instance of MIG
      entries[*number].pid = pid;
      entries[*number].used = bytes;
    }
    ++*number;
  }
  return *number <= room ? SUCCESS : INSUFFICIENT_SIZE;
}
EMU_EXPORT Result nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* number, Process* processes) {
  return running_processes(device, number, processes);
}
EMU_EXPORT Result nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned* number, Process* processes) {
  return running_processes(device, number, processes);
}
EMU_EXPORT Result nvmlDeviceGetComputeRunningProcesses(Device device, unsigned* number, Process1* processes) {
  return running_processes(device, number, processes);
}

struct Utilization {
  unsigned gpu, memory;
};
EMU_EXPORT Result nvmlDeviceGetUtilizationRates(Device device, Utilization* rates) {
  if (emucuda_physical_lost(number_of(device))) return GPU_IS_LOST;
  *rates = {42, 7};
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetTemperature(Device device, int, unsigned* celsius) {
  if (emucuda_physical_lost(number_of(device))) return GPU_IS_LOST;
  *celsius = 40;
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetPowerUsage(Device device, unsigned* milliwatts) {
  if (emucuda_physical_lost(number_of(device))) return GPU_IS_LOST;
  *milliwatts = 300000;
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetClockInfo(Device device, int, unsigned* megahertz) {
  if (emucuda_physical_lost(number_of(device))) return GPU_IS_LOST;
  *megahertz = 1980;
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetNvLinkState(Device, unsigned, int*) { return NOT_SUPPORTED; }
EMU_EXPORT Result nvmlDeviceGetNvLinkRemotePciInfo_v2(Device, unsigned, void*) { return NOT_SUPPORTED; }
EMU_EXPORT Result nvmlDeviceGetNvLinkRemoteDeviceType(Device, unsigned, void*) { return NOT_SUPPORTED; }
// In no fabric; a failing call would end expandable segments.
struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};
EMU_EXPORT Result nvmlDeviceGetGpuFabricInfoV(Device, FabricInfo* info) {
  *info = {info->version, {}, SUCCESS, 0, 0, 0};
  return SUCCESS;
}
