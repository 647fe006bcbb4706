// How often the process called the runtime and the driver, by kind of call; and the emulation's own processor time.
#pragma once
#include <atomic>

namespace emu {

#define EMU_COUNTERS(X)                                                                                       \
  X(launch) X(graph_launch) X(emulated_operator) X(gemm)                                                        \
  X(device_sync) X(stream_sync) X(event_sync) X(stream_query) X(event_query)                                  \
  X(event_record) X(stream_wait_event)                                                                        \
  X(copy_blocking) X(copy_h2d) X(copy_d2h) X(copy_d2d) X(copy_pageable) X(memset)                             \
  X(malloc) X(free) X(mem_create) X(mem_release) X(mem_map) X(mem_unmap) X(host_alloc) X(host_free) X(host_register)

enum class Counter {
#define X(name) name,
  EMU_COUNTERS(X)
#undef X
      number_of_counters
};

void count(Counter counter);

}  // namespace emu
