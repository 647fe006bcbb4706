#include "counters.h"

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

void count(Counter counter) { values[static_cast<int>(counter)].fetch_add(1, std::memory_order_relaxed); }

}  // namespace emu

using namespace emu;

EMU_EXPORT int emucuda_counter_number(void) { return N_COUNTERS; }
EMU_EXPORT const char* emucuda_counter_name(int index) { return NAMES[index]; }
EMU_EXPORT unsigned long long emucuda_counter_value(int index) { return values[index].load(); }
EMU_EXPORT void emucuda_count_operator(int synchronises) {
  count(Counter::emulated_operator);
  if (synchronises) count(Counter::stream_sync);
}
