#include "assumptions.h"

#include <atomic>
#include <cstdint>

#include "../settings.h"

namespace {

std::atomic<void (*)(int)> listener{nullptr};
std::atomic<long long (*)()> asked{nullptr};
std::atomic<uint64_t> types_seen{0};

}  // namespace

namespace emu {

void assume(Assumption made) {
  if (auto* tell = listener.load()) tell(static_cast<int>(made));
}
long long given_number() {
  auto* ask = asked.load();
  return ask ? ask() : -1;
}
void see_type(int scalar_type) {
  uint64_t bit = uint64_t{1} << scalar_type;
  if (!(types_seen.load(std::memory_order_relaxed) & bit)) types_seen |= bit;
}

}  // namespace emu

EMU_EXPORT void emucuda_on_assumption(void (*tell)(int)) { listener = tell; }
EMU_EXPORT void emucuda_on_unknown(long long (*ask)()) { asked = ask; }
// A bit for each c10::ScalarType of the tensors that operators were called with.
EMU_EXPORT unsigned long long emucuda_types_seen() { return types_seen; }
