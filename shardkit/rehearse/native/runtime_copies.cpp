// Runtime API: copies and fills. A copy between pinned and device memory is asynchronous, as it is on a GPU.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "core.h"
#include "counters.h"
#include "errors.h"
#include "lost.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

using namespace emu;

static std::atomic<const Profiler*> profiler{nullptr};
EMU_EXPORT void emucuda_attach_profiler(const Profiler* to) { profiler = to; }
EMU_EXPORT const Profiler* emucuda_profiler(void) { return profiler; }

static thread_local size_t largest = settings().skip_above;  // copy that moves its bytes
EMU_EXPORT size_t emucuda_move_up_to(size_t bytes) { return std::exchange(largest, bytes); }

// What happens to the bytes of a copy. In no-compute mode the host gets zeros for those that nobody computed: what lies in
// their place may be no number, and a program that looks at its offloaded gradients would see a training that diverges.
enum class Move { BYTES, ZEROS, NOTHING };
// `bytes` are moved, of the `span` that begins at `from`.
static Move move_of(const void* from, size_t bytes, size_t span, bool from_device, bool to_device) {
  bool large = bytes > largest;
  if (from_device && !to_device) {
    const Tracker* tracker = emucuda_tracker();
    return large || (tracker && tracker->is_skipped(from, span)) ? Move::ZEROS : Move::BYTES;
  }
  return large && to_device ? Move::NOTHING : Move::BYTES;
}
static void move(Move how, void* to, const void* from, size_t bytes) {
  if (how == Move::BYTES) std::memmove(to, from, bytes);
  if (how == Move::ZEROS) emucuda_zero(to, bytes);
}

static void copy_in_stream(Move how, void* to, const void* from, size_t bytes, Stream* stream, bool to_device) {
  const Profiler* recorded = profiler;
  ActivityKind kind = to_device ? ACTIVITY_COPY_TO_DEVICE : ACTIVITY_COPY_TO_HOST;
  uint32_t correlation = recorded ? recorded->launched(kind, recorded->now(), recorded->now()) : 0;
  stream->enqueue([=, called = now_ms()] {
    if (settings().copy_delay_us) usleep(settings().copy_delay_us);
    stream->spend(called, settings().copy_delay_us / 1e3);
    uint64_t begin = recorded ? recorded->now() : 0;
    move(how, to, from, bytes);
    if (recorded) {
      Activity done{kind, "", stream->device, stream->id, bytes, correlation, begin, recorded->now()};
      recorded->finished(&done);
    }
  });
}

static cudaError_t copy_async(void* to, const void* from, size_t bytes, cudaStream_t handle) {
  if (!bytes) return cudaSuccess;
  Stream* stream = stream_of(handle);
  EMU_NEEDS(stream->device);
  Block source, target;
  bool source_known = memory().find(from, &source), target_known = memory().find(to, &target);
  bool from_device = source_known && source.on_device(), to_device = target_known && target.on_device();
  count(from_device && to_device ? Counter::copy_d2d : from_device ? Counter::copy_d2h : Counter::copy_h2d);
  if (!source_known || !target_known) count(Counter::copy_pageable);
  Move how = move_of(from, bytes, bytes, from_device, to_device);
  if (from_device && to_device) {
    // Kernels run as they are called, so a copy among device memory does too, once the stream is there.
    launched(stream, settings().kernel_ms);
    if (how == Move::NOTHING) return cudaSuccess;
    Spend computing(COMPUTING);
    if (!stream->drain()) return failed(LOST);
    std::memmove(to, from, bytes);
  } else if (!source_known || !target_known) {
    // The driver stages pageable memory before the call returns.
    if (!stream->synchronise()) return failed(LOST);
    move(how, to, from, bytes);
  } else if (how != Move::NOTHING) {
    copy_in_stream(how, to, from, bytes, stream, to_device);
  }
  return cudaSuccess;
}

static bool on_device(const void* address) {
  Block block;
  return memory().find(address, &block) && block.on_device();
}

static cudaError_t copy_blocking(void* to, const void* from, size_t bytes) {
  count(Counter::copy_blocking);
  EMU_NEEDS(current_device());
  if (!stream_of(nullptr)->synchronise()) return failed(LOST);
  move(move_of(from, bytes, bytes, on_device(from), on_device(to)), to, from, bytes);
  return cudaSuccess;
}

static cudaError_t fill(void* at, int value, size_t bytes, Stream* stream) {
  count(Counter::memset);
  EMU_NEEDS(stream->device);
  launched(stream, settings().kernel_ms);
  if (bytes > settings().skip_above) return cudaSuccess;
  Spend computing(COMPUTING);
  if (!stream->drain()) return failed(LOST);
  if (value)
    std::memset(at, value, bytes);
  else
    emucuda_zero(at, bytes);
  return cudaSuccess;
}

static cudaError_t copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                             size_t height, Stream* stream) {
  EMU_NEEDS(stream->device);
  Spend computing(COMPUTING);
  if (!stream->drain()) return failed(LOST);
  if (!width || !height) return cudaSuccess;
  size_t span = (height - 1) * from_pitch + width;
  Move how = move_of(from, width * height, span, on_device(from), on_device(to));
  for (size_t row = 0; row < height; row++)
    move(how, static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cudaSuccess;
}

EMU_EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy_blocking(to, from, bytes);
}
EMU_EXPORT cudaError_t cudaMemcpyPeer(void* to, int, const void* from, int, size_t bytes) {
  return copy_blocking(to, from, bytes);
}
EMU_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy_async(to, from, bytes, stream);
}
EMU_EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy_async(to, from, bytes, stream);
}
EMU_EXPORT cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                    size_t height, cudaMemcpyKind) {
  count(Counter::copy_blocking);
  if (!stream_of(nullptr)->synchronise()) return failed(LOST);
  return copy_rows(to, to_pitch, from, from_pitch, width, height, stream_of(nullptr));
}
EMU_EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                         size_t height, cudaMemcpyKind, cudaStream_t stream) {
  count(Counter::copy_d2d);
  return copy_rows(to, to_pitch, from, from_pitch, width, height, stream_of(stream));
}
EMU_EXPORT cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  return fill(at, value, bytes, stream_of(nullptr));
}
EMU_EXPORT cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return fill(at, value, bytes, stream_of(stream));
}
