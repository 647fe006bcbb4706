// NVML: all devices, whatever CUDA_VISIBLE_DEVICES says. Load, power and temperature are made up and constant.
// Declared by hand: no wheel brings nvml.h. What is not here fails to resolve, and its caller says so.
#include <unistd.h>

#include <cstdio>

#include "core.h"
#include "lost.h"
#include "settings.h"

using emu::settings;

enum Result { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
using Device = void*;  // physical number + 1

static int number_of(Device device) { return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1; }
// Bytes that this process holds of it.
static size_t used_memory(Device device) {
  for (int number = 0; number < settings().devices(); number++)
    if (settings().visible[number] == number_of(device)) return emucuda_used_memory(number);
  return 0;
}
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
  info->used = used_memory(device);
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
struct Process {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
EMU_EXPORT Result nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* number, Process* processes) {
  if (emucuda_physical_lost(number_of(device))) return GPU_IS_LOST;
  if (*number < 1) {
    *number = 1;
    return INSUFFICIENT_SIZE;
  }
  *number = 1;
  processes[0] = {static_cast<unsigned>(getpid()), used_memory(device), ~0u, ~0u};
  return SUCCESS;
}
EMU_EXPORT Result nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned* number, Process* processes) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, number, processes);
}
EMU_EXPORT Result nvmlDeviceGetComputeRunningProcesses(Device device, unsigned* number, Process* processes) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, number, processes);
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
