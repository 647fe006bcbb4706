#include "streams.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <thread>
#include <unordered_set>
#include <vector>

#include "core.h"
#include "counters.h"
#include "lost.h"
#include "settings.h"

namespace emu {

int& current_device() {
  thread_local int device = 0;
  return device;
}

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

bool sleep_until(double ms, int device) {
  for (double left; (left = ms - now_ms()) > 0;) {
    bool can_be_lost = emucuda_can_be_lost(device);
    if (can_be_lost && lost(device)) return false;
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(can_be_lost ? std::min(left, 20.0) : left));
  }
  return true;
}

void Marker::reach(double at_ms) {
  std::lock_guard<std::mutex> lock(mutex_);
  reached_ = true;
  at_ms_ = at_ms;
  changed_.notify_all();
}

bool Marker::wait(int device) {
  std::unique_lock<std::mutex> lock(mutex_);
  return wait_unless_lost(changed_, lock, device, [this] { return reached_; });
}

bool Marker::reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

bool Marker::passed() { return reached() && now_ms() >= at_ms(); }

double Marker::at_ms() {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_ms_;
}

struct Streams {
  std::mutex mutex;
  std::unordered_set<Stream*> all;
  std::map<int, Stream*> of_device;
};
static Streams& streams() {
  static Streams* all = new Streams;
  return *all;
}

static unsigned next_id() {
  static std::atomic<unsigned> next{1};
  return next++;
}

Stream::Stream(int on_device, unsigned with_flags, int with_priority)
    : device(on_device), flags(with_flags), priority(with_priority), id(next_id()) {}

void Stream::enqueue(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  push({std::move(task), nullptr, 0});
}

void Stream::mark(std::shared_ptr<Marker> marker) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry entry{nullptr, std::move(marker), now_ms()};
  if (queue_.empty() && !busy_)
    reach(entry);
  else
    push(std::move(entry));
}

void Stream::push(Entry entry) {
  Spend bookkeeping(BOOKKEEPING);  // a driver would ring the device's bell
  if (!started_) {  // most of the streams that torch makes are never used
    started_ = true;
    std::thread(&Stream::work, this).detach();
  }
  queue_.push_back(std::move(entry));
  queued_.notify_one();
}

void Stream::reach(const Entry& mark) {
  mark.marker->reach(settings().virtual_time() ? std::max(mark.called_ms, clock_ms_) : now_ms());
}

void Stream::work() {
  current_device() = device;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    Spend streams(STREAMS);
    queued_.wait(lock, [this] { return destroyed_ || !queue_.empty(); });
    if (queue_.empty()) break;
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    if (entry.marker) {
      reach(entry);  // whoever sees it reached sees the stream idle
    } else {
      busy_ = true;
      lock.unlock();
      entry.task();
      entry.task = nullptr;  // what it holds goes before the stream is idle
      lock.lock();
      busy_ = false;
    }
    if (queue_.empty()) emptied_.notify_all();
  }
  lock.unlock();
  delete this;
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::when_there(std::function<void()> task) {
  if (idle())
    task();
  else
    enqueue(std::move(task));
}

bool Stream::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  return wait_unless_lost(emptied_, lock, device, [this] { return queue_.empty() && !busy_; });
}

bool Stream::synchronise() { return drain() && sleep_until(clock_ms(), device); }
bool Stream::done() { return idle() && now_ms() >= clock_ms(); }

double Stream::clock_ms() {
  std::lock_guard<std::mutex> lock(mutex_);
  return clock_ms_;
}

void Stream::spend(double called_ms, double ms) {
  std::lock_guard<std::mutex> lock(mutex_);
  clock_ms_ = std::max(clock_ms_, called_ms) + ms;
}

void Stream::destroy() {
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(this);
  }
  bool worker_deletes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    destroyed_ = true;
    worker_deletes = started_;
    queued_.notify_one();
  }
  if (!worker_deletes) delete this;
}

bool is_default_stream(const void* handle) { return reinterpret_cast<uintptr_t>(handle) <= 2; }

Stream* make_stream(unsigned flags, int priority) {
  auto* stream = new Stream(current_device(), flags, priority);
  std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.insert(stream);
  return stream;
}

Stream* stream_of(const void* handle) {
  if (!is_default_stream(handle)) return static_cast<Stream*>(const_cast<void*>(handle));
  std::lock_guard<std::mutex> lock(streams().mutex);
  Stream*& stream = streams().of_device[current_device()];
  if (!stream) {
    stream = new Stream(current_device(), 0, 0);
    streams().all.insert(stream);
  }
  return stream;
}

bool synchronise_device(int device) {
  std::vector<Stream*> wanted;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (auto* stream : streams().all)
      if (stream->device == device) wanted.push_back(stream);
  }
  for (auto* stream : wanted)
    if (!stream->synchronise()) return false;
  return true;
}

void synchronise_all_devices() {
  for (int device = 0; device < settings().devices(); device++) synchronise_device(device);
}

void launched(Stream* stream, double ms) {
  if (captured(stream, ms)) return;
  if (!settings().virtual_time()) return;
  stream->when_there([stream, called = now_ms(), ms] { stream->spend(called, ms); });
}

}  // namespace emu

using namespace emu;

EMU_EXPORT void emucuda_drain(void* stream) { stream_of(stream)->drain(); }
EMU_EXPORT void emucuda_synchronise(void* stream) { stream_of(stream)->synchronise(); }
EMU_EXPORT double emucuda_now_ms(void) { return now_ms(); }
EMU_EXPORT double emucuda_clock_ms(void* stream) { return stream_of(stream)->clock_ms(); }
EMU_EXPORT void emucuda_spend(void* stream, double called_ms, int product) {
  if (settings().virtual_time())
    stream_of(stream)->spend(called_ms, product ? settings().product_ms : settings().kernel_ms);
}
EMU_EXPORT void emucuda_gemm(void* handle) {
  count(Counter::gemm);
  launched(stream_of(handle), settings().product_ms);
}
EMU_EXPORT void emucuda_enqueue(void* stream, void (*task)(void*), void* argument) {
  stream_of(stream)->enqueue([=] { task(argument); });
}
EMU_EXPORT unsigned emucuda_stream_id(void* stream) { return stream_of(stream)->id; }
EMU_EXPORT int emucuda_current_device(void) { return current_device(); }
