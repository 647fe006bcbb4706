#include "record.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "../settings.h"

namespace emu {

static thread_local int depth = 0;

static void write(const char* what, const std::string& name, size_t bytes) {
  static std::mutex mutex;
  static const char* rank = std::getenv("RANK");
  static const std::string path =
      std::string(std::getenv("EMUCUDA_RECORD")) + "." + (rank ? rank : std::to_string(getpid()));
  static FILE* file = std::fopen(path.c_str(), "w");
  std::lock_guard<std::mutex> lock(mutex);
  if (!file) std::perror(path.c_str()), std::abort();
  if (bytes)
    std::fprintf(file, "%s %zu\n", what, bytes);
  else
    std::fprintf(file, "%s %s\n", what, name.c_str());
  std::fflush(file);
}

static bool recording() {
  static const bool on = [] {
    const char* path = std::getenv("EMUCUDA_RECORD");
    if (!path || !*path) return false;
    using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Entry& entry) {
      if (entry.action_ == Entry::ALLOC) write("alloc", "", entry.size_);
      if (entry.action_ == Entry::FREE_REQUESTED) write("free", "", entry.size_);
    });
    return true;
  }();
  return on;
}

Recorded::Recorded(const std::string& name) {
  static const bool tracing = flag_from_env("EMUCUDA_TRACE_OPS");
  if (tracing) std::fprintf(stderr, "[emucuda] operator %s\n", name.c_str());
  if (recording() && depth++ == 0) write("operator", name, 0);
}
Recorded::~Recorded() {
  if (recording() && --depth == 0) write("end", "", 0);
}

}  // namespace emu
