#include "counters.h"

#include <time.h>

#include "core.h"
#include "settings.h"

namespace emu {

static const int N_COUNTERS = static_cast<int>(Counter::number_of_counters);
static std::atomic<unsigned long long> values[N_COUNTERS];
static const char* const NAMES[] = {
#define X(name) #name,
    EMU_COUNTERS(X)
#undef X
};

// Nanoseconds. The processor time of a thread, as waiting for others is nobody's work.
static const char* const TIMES[] = {"computing_ns", "bookkeeping_ns", "streams_ns", "emulating_here_ns"};
static const int N_TIMES = sizeof TIMES / sizeof *TIMES;
static std::atomic<unsigned long long> spent[STREAMS + 1];
struct Here {
  int on = PROGRAM;
  unsigned long long since = 0, emulating = 0;
};
static thread_local Here here;

static unsigned long long processor_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static unsigned long long time_of(int index) {
  return index == N_TIMES - 1 ? here.emulating : spent[COMPUTING + index].load();
}

void count(Counter counter) { values[static_cast<int>(counter)].fetch_add(1, std::memory_order_relaxed); }

}  // namespace emu

using namespace emu;

EMU_EXPORT int emucuda_counter_number(void) { return N_COUNTERS + N_TIMES; }
EMU_EXPORT const char* emucuda_counter_name(int index) {
  return index < N_COUNTERS ? NAMES[index] : TIMES[index - N_COUNTERS];
}
EMU_EXPORT unsigned long long emucuda_counter_value(int index) {
  return index < N_COUNTERS ? values[index].load() : time_of(index - N_COUNTERS);
}
EMU_EXPORT int emucuda_spend_host(int on) {
  int before = here.on;
  if (on == before) return before;
  unsigned long long now = processor_ns();
  if (before != PROGRAM) {
    spent[before] += now - here.since;
    here.emulating += now - here.since;
  }
  here.on = on;
  here.since = now;
  return before;
}
EMU_EXPORT void emucuda_count_operator(int synchronises) {
  count(Counter::emulated_operator);
  if (synchronises) count(Counter::stream_sync);
}
