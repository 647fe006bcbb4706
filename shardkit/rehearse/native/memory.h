// Device and pinned memory: host memory with a record of what it stands for, within each device's size.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace emu {

enum class MemoryKind { device, managed, pinned, registered };

struct Block {
  uintptr_t begin;
  size_t size;
  MemoryKind kind;
  int device;
  unsigned flags;

  bool on_device() const { return kind == MemoryKind::device || kind == MemoryKind::managed; }
};

class Memory {
 public:
  // False when the device is full.
  bool reserve(int device, size_t bytes);
  void release(int device, size_t bytes);
  size_t used(int device);
  size_t peak(int device);
  size_t available(int device);

  // The same of page-locked host memory, of which EMUCUDA_HOST_MEMORY bytes may be had.
  bool reserve_host(size_t bytes);
  void release_host(size_t bytes);

  // Anonymous memory; null when the device (or the host) has no more.
  void* allocate_device(int device, size_t bytes, MemoryKind kind = MemoryKind::device);
  void* allocate_pinned(int device, size_t bytes, unsigned flags);
  // Give back what `allocate_*` returned; false when `address` is not such a block.
  bool free(const void* address, bool pinned);

  // Memory that someone else made: virtual memory, or host memory that is registered. False where it overlaps.
  bool adopt(const Block& block);
  bool forget(const void* address, MemoryKind kind);

  // The block that has `address` in it; false when none has.
  bool find(const void* address, Block* found);

 private:
  std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
  static const int MAX_DEVICES = 64;
  size_t used_[MAX_DEVICES] = {}, peak_[MAX_DEVICES] = {}, host_used_ = 0;
};

Memory& memory();
inline size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace emu
