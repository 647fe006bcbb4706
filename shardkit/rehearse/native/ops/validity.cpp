#include "validity.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "../core.h"

namespace emu {

namespace {

struct Range {
  uintptr_t end;
  Validity validity;
};
std::mutex mutex;
// By their first byte, without overlaps; all else is computed. Never destroyed, as threads outlive main.
std::map<uintptr_t, Range>& ranges() {
  static auto* held = new std::map<uintptr_t, Range>;
  return *held;
}

struct Span {
  uintptr_t begin, end;
};
Span span(const void* at, size_t bytes) {
  auto begin = reinterpret_cast<uintptr_t>(at);
  return {begin, begin + bytes};
}
Span span(const Tensor& tensor) {
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + (last + 1) * tensor.element_size()};
}
// A sparse tensor has no bytes but those of its indices and values, which are tensors themselves.
bool is_plain(const Tensor& tensor) { return tensor.layout() == at::kStrided; }
bool nothing(const Tensor& tensor) {
  return !tensor.defined() || !tensor.is_cuda() || !is_plain(tensor) || tensor.numel() == 0;
}

std::atomic<unsigned> skipped_arrivals{0};
const size_t TINY_FLOATS = emucuda_skip_above() / 16;

}  // namespace

static Validity validity(Span of) {
  auto [begin, end] = of;
  std::lock_guard<std::mutex> lock(mutex);
  auto at = ranges().upper_bound(begin);
  if (at != ranges().begin()) --at;
  Validity worst = Validity::computed;
  for (; at != ranges().end() && at->first < end; ++at)
    if (at->second.end > begin) worst = std::max(worst, at->second.validity);
  return worst;
}
Validity validity(const Tensor& tensor) { return nothing(tensor) ? Validity::computed : validity(span(tensor)); }

static void mark(Span of, Validity now) {
  auto [begin, end] = of;
  std::lock_guard<std::mutex> lock(mutex);
  auto& held = ranges();
  auto at = held.upper_bound(begin);
  if (at != held.begin()) --at;
  while (at != held.end() && at->first < end) {
    auto [first, range] = *at;
    if (range.end <= begin) {
      ++at;
      continue;
    }
    at = held.erase(at);
    if (first < begin) held[first] = {begin, range.validity};
    if (range.end > end) held[end] = {range.end, range.validity};
  }
  if (now != Validity::computed) held[begin] = {end, now};
}
void mark(const Tensor& tensor, Validity now) {
  if (!nothing(tensor)) mark(span(tensor), now);
}

unsigned arrivals() { return skipped_arrivals; }

bool decides(const Tensor& tensor) { return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true); }
bool is_bytes(const Tensor& tensor) { return tensor.scalar_type() == at::kByte || tensor.scalar_type() == at::kChar; }
bool is_weights(const Tensor& tensor) {
  return (is_bytes(tensor) || tensor.scalar_type() == at::kInt) && tensor.nbytes() > emucuda_skip_above();
}
bool is_small(const Tensor& tensor) {
  static const size_t floats = emucuda_skip_above(), others = 64 * floats;
  if (!tensor.defined()) return true;
  return is_plain(tensor) && tensor.nbytes() <= (decides(tensor) ? others : floats);
}
bool is_tiny(const Tensor& tensor) {
  if (!tensor.defined() || decides(tensor)) return is_small(tensor);
  return is_plain(tensor) && tensor.nbytes() <= TINY_FLOATS;
}

void leave(const Tensor& tensor) {
  bool ones = !nothing(tensor) && !decides(tensor) && is_tiny(tensor);
  if (ones) {
    Spend computing(COMPUTING);
    drain_current_stream(tensor.device());
    on_host(tensor).fill_(1);
  }
  mark(tensor, ones ? Validity::stand_in : Validity::skipped);
}

}  // namespace emu

using namespace emu;

static int is_skipped(const void* at, size_t bytes) { return validity(span(at, bytes)) == Validity::skipped; }
static void skip(void* at, size_t bytes, int floats) {
  mark(span(at, bytes), floats && bytes <= TINY_FLOATS ? Validity::stand_in : Validity::skipped);
  skipped_arrivals++;
}
static void know(void* at, size_t bytes) { mark(span(at, bytes), Validity::computed); }
static const Tracker TRACKER = {is_skipped, skip, know};
static const bool ATTACHED = (emucuda_attach_tracker(&TRACKER), true);
