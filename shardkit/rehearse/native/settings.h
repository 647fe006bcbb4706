// The environment variables that describe the emulated machine; README.md has the table.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

namespace emu {

// "8G", "512M", "64k" or plain bytes.
inline size_t size_from_env(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  char* unit;
  double value = std::strtod(text, &unit);
  switch (*unit | 0x20) {
    case 'k': return static_cast<size_t>(value * (1ull << 10));
    case 'm': return static_cast<size_t>(value * (1ull << 20));
    case 'g': return static_cast<size_t>(value * (1ull << 30));
    default: return static_cast<size_t>(value);
  }
}

inline bool flag_from_env(const char* name, bool otherwise = false) {
  const char* text = std::getenv(name);
  return text && *text ? std::strcmp(text, "0") != 0 : otherwise;
}

struct Settings {
  int physical;              // devices of the machine, as NVML sees them
  std::vector<int> visible;  // physical number of each device that CUDA_VISIBLE_DEVICES leaves
  std::string name;
  size_t memory, context;
  int major = 9, minor = 0;
  bool compute, poison, trace;
  unsigned copy_delay_us;
  double kernel_ms, product_ms;  // virtual time that a kernel, or a matrix product, keeps its stream busy
  size_t skip_above;  // no-compute mode: copies and collectives of more bytes than this move nothing

  bool virtual_time() const { return kernel_ms > 0 || product_ms > 0; }
  int devices() const { return static_cast<int>(visible.size()); }

  Settings() {
    physical = static_cast<int>(size_from_env("EMUCUDA_DEVICES", 1));
    if (const char* list = std::getenv("CUDA_VISIBLE_DEVICES")) {
      // As the driver does: numbers up to the first that is not a device.
      for (const char* at = list; *at;) {
        char* end;
        long device = std::strtol(at, &end, 10);
        if (end == at || device < 0 || device >= physical) break;
        visible.push_back(static_cast<int>(device));
        if (*end != ',') break;
        at = end + 1;
      }
    } else {
      for (int device = 0; device < physical; device++) visible.push_back(device);
    }
    const char* text = std::getenv("EMUCUDA_NAME");
    name = text && *text ? text : "Emulated GPU";
    memory = size_from_env("EMUCUDA_MEMORY", size_t{8} << 30);
    context = size_from_env("EMUCUDA_CONTEXT", 0);
    if (const char* capability = std::getenv("EMUCUDA_SM")) {
      char* dot;
      major = static_cast<int>(std::strtol(capability, &dot, 10));
      minor = *dot == '.' ? std::atoi(dot + 1) : 0;
    }
    compute = flag_from_env("EMUCUDA_COMPUTE", true);
    poison = flag_from_env("EMUCUDA_POISON");
    trace = flag_from_env("EMUCUDA_TRACE");
    copy_delay_us = static_cast<unsigned>(size_from_env("EMUCUDA_COPY_DELAY_US", 0));
    kernel_ms = static_cast<double>(size_from_env("EMUCUDA_KERNEL_US", 0)) / 1e3;
    const char* product = std::getenv("EMUCUDA_GEMM_US");
    product_ms = product && *product ? static_cast<double>(size_from_env("EMUCUDA_GEMM_US", 0)) / 1e3 : kernel_ms;
    skip_above = compute ? static_cast<size_t>(-1) : size_from_env("EMUCUDA_SKIP_ABOVE", 1 << 20);
  }
};

// Never destroyed: worker threads may still run while the process exits. So are the other globals here.
inline const Settings& settings() {
  static const Settings* read = new Settings;
  return *read;
}

}  // namespace emu
