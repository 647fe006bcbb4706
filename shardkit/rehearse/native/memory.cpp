#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "account.h"
#include "core.h"
#include "settings.h"

namespace emu {

Memory& memory() {
  static Memory* one = new Memory;
  return *one;
}

bool Memory::reserve(int device, size_t bytes) {
  if (!account().take(settings().visible[device], bytes)) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  used_[device] += bytes;
  peak_[device] = std::max(peak_[device], used_[device]);
  return true;
}

void Memory::release(int device, size_t bytes) {
  account().give(settings().visible[device], bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  used_[device] -= bytes;
}

size_t Memory::used(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_[device];
}

size_t Memory::peak(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_[device];
}

size_t Memory::available(int device) {
  return settings().memory - std::min(settings().memory, account().used(settings().visible[device]));
}

bool Memory::reserve_host(size_t bytes) {
  static const size_t limit = size_from_env("EMUCUDA_HOST_MEMORY", static_cast<size_t>(-1));
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > limit || host_used_ > limit - bytes) return false;
  host_used_ += bytes;
  return true;
}

void Memory::release_host(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  host_used_ -= bytes;
}

static void* map_host(size_t bytes) {
  // NORESERVE: untouched pages cost nothing, so an 80 GB card fits on a small host.
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void* Memory::allocate_device(int device, size_t bytes, MemoryKind kind) {
  // cudaMalloc takes whole pages of 2 MiB for large requests; small ones share pages.
  size_t size = round_up(bytes, bytes >= (1 << 20) ? (2 << 20) : 4096);
  if (size < bytes || !reserve(device, size)) return nullptr;
  void* address = map_host(size);
  if (!address) {
    release(device, size);
    return nullptr;
  }
  if (settings().poison) std::memset(address, 0xFF, size);
  std::lock_guard<std::mutex> lock(mutex_);
  auto begin = reinterpret_cast<uintptr_t>(address);
  blocks_[begin] = {begin, size, kind, device, 0};
  return address;
}

void* Memory::allocate_pinned(int device, size_t bytes, unsigned flags) {
  size_t size = round_up(bytes, 4096);
  if (size < bytes || !reserve_host(size)) return nullptr;
  void* address = map_host(size);
  if (!address) {
    release_host(size);
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto begin = reinterpret_cast<uintptr_t>(address);
  blocks_[begin] = {begin, size, MemoryKind::pinned, device, flags};
  return address;
}

bool Memory::free(const void* address, bool pinned) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto entry = blocks_.find(reinterpret_cast<uintptr_t>(address));
  if (entry == blocks_.end()) return false;
  const Block& block = entry->second;
  if (pinned ? block.kind != MemoryKind::pinned : !block.on_device()) return false;
  munmap(reinterpret_cast<void*>(block.begin), block.size);
  (pinned ? host_used_ : used_[block.device]) -= block.size;
  if (!pinned) account().give(settings().visible[block.device], block.size);
  blocks_.erase(entry);
  return true;
}

bool Memory::adopt(const Block& block) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = blocks_.lower_bound(block.begin);
  if (next != blocks_.end() && next->first < block.begin + block.size) return false;
  if (next != blocks_.begin()) {
    const Block& before = std::prev(next)->second;
    if (before.begin + before.size > block.begin) return false;
  }
  blocks_[block.begin] = block;
  return true;
}

bool Memory::forget(const void* address, MemoryKind kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto entry = blocks_.find(reinterpret_cast<uintptr_t>(address));
  if (entry == blocks_.end() || entry->second.kind != kind) return false;
  if (kind == MemoryKind::registered) host_used_ -= entry->second.size;
  blocks_.erase(entry);
  return true;
}

bool Memory::find(const void* address, Block* found) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto entry = blocks_.upper_bound(at);
  if (entry == blocks_.begin()) return false;
  --entry;
  if (at >= entry->second.begin + entry->second.size) return false;
  *found = entry->second;
  return true;
}

}  // namespace emu

EMU_EXPORT size_t emucuda_used_memory(int device) { return emu::memory().used(device); }
EMU_EXPORT size_t emucuda_peak_memory(int device) { return emu::memory().peak(device); }
EMU_EXPORT void emucuda_zero(void* at, size_t bytes) {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto begin = reinterpret_cast<uintptr_t>(at), end = begin + bytes;
  uintptr_t first = emu::round_up(begin, page), last = end / page * page;
  void* pages = reinterpret_cast<void*>(first);
  // The first is for virtual memory, which is a file without a name, and refused for what cudaMalloc made.
  bool given_back = first < last && (!madvise(pages, last - first, MADV_REMOVE) ||
                                     !madvise(pages, last - first, MADV_DONTNEED));
  if (!given_back) first = last = end;
  std::memset(at, 0, first - begin);
  std::memset(reinterpret_cast<void*>(last), 0, end - last);
}
static std::atomic<const Tracker*> tracker{nullptr};
EMU_EXPORT void emucuda_attach_tracker(const Tracker* to) { tracker = to; }
EMU_EXPORT const Tracker* emucuda_tracker(void) { return tracker; }
EMU_EXPORT size_t emucuda_skip_above(void) { return emu::settings().skip_above; }
