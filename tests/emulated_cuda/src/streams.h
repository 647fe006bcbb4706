// Streams run their tasks in order, each on a thread of its own, so that a missing wait shows; events mark positions.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace emu {

// The device that the calling thread has chosen (cudaSetDevice).
int& current_device();

// One recorded position in a stream.
class Marker {
 public:
  void reach();
  bool wait(int device);  // false: the device was lost before
  bool reached();
  double reached_at_ms();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  double at_ms_ = 0;
};

class Stream {
 public:
  Stream(int device, unsigned flags, int priority);
  const int device;
  const unsigned flags;
  const int priority;
  const unsigned id;

  void enqueue(std::function<void()> task);
  bool idle();
  bool drain();  // false: its device was lost
  void destroy();  // once its queue is empty

 private:
  void work();
  std::mutex mutex_;
  std::condition_variable queued_, emptied_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, started_ = false, destroyed_ = false;
};

// A handle of the CUDA API; null and the two reserved numbers are the current device's default stream.
Stream* stream_of(const void* handle);
bool is_default_stream(const void* handle);
Stream* make_stream(unsigned flags, int priority);
bool drain_device(int device);  // false: it was lost
void drain_all_devices();

struct Event {
  unsigned flags;
  int device;
  std::mutex mutex;
  std::shared_ptr<Marker> marker;  // null until recorded

  std::shared_ptr<Marker> recorded() {
    std::lock_guard<std::mutex> lock(mutex);
    return marker;
  }
};

}  // namespace emu
