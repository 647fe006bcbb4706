// Streams run their tasks in order, each on a thread of its own, so that a missing wait shows; events mark positions.
//
// Beside it runs a virtual time, if kernels have durations: each stream has a clock, the moment at which all that it
// has run would be done on a device. Bytes move and operators compute ahead of that clock; whoever waits on the host
// (for a stream, an event, a blocking copy) sleeps until it.
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
  void reach(double at_ms);
  bool wait(int device);  // until it is reached, whatever its time; false: the device was lost before
  bool reached();
  bool passed();  // reached, and its time is over
  double at_ms();

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
  void mark(std::shared_ptr<Marker> marker);  // it is reached in its turn
  bool idle();
  void when_there(std::function<void()> task);  // at once if the stream is idle: saves its thread
  bool drain();  // until all that is queued has run; false: its device was lost
  bool synchronise();  // and until its clock
  bool done();  // what `synchronise` waits for
  double clock_ms();
  void spend(double called_ms, double ms);  // busy from then, or from what runs before, for so long
  void destroy();  // once its queue is empty

 private:
  struct Entry {
    std::function<void()> task;
    std::shared_ptr<Marker> marker;  // instead of a task
    double called_ms;
  };
  void push(Entry entry);
  void reach(const Entry& mark);
  void work();
  std::mutex mutex_;
  std::condition_variable queued_, emptied_;
  std::deque<Entry> queue_;
  double clock_ms_ = 0;
  bool busy_ = false, started_ = false, destroyed_ = false;
};

// A handle of the CUDA API; null and the two reserved numbers are the current device's default stream.
Stream* stream_of(const void* handle);
bool is_default_stream(const void* handle);
Stream* make_stream(unsigned flags, int priority);
bool synchronise_device(int device);  // false: it was lost
void synchronise_all_devices();

void launched(Stream* stream, double ms);  // a kernel that computes nothing: its turn will take so long
bool captured(const Stream* stream, double ms);  // whether a CUDA graph takes the kernel instead
bool capturing(const Stream* stream);

double now_ms();
bool sleep_until(double ms, int device);  // false: the device was lost before

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
