// What the runtime library (libcudart) offers to the other emulated libraries and to the operators.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
void emucuda_drain(void* stream);  // wait until everything queued on the stream has run; its virtual time goes on
void emucuda_synchronise(void* stream);  // wait for its virtual time too, as the program would
void emucuda_enqueue(void* stream, void (*task)(void*), void* argument);
unsigned emucuda_stream_id(void* stream);
// Virtual time (streams.h). A kernel that was called at `called_ms` and has run keeps the stream busy.
double emucuda_now_ms(void);
double emucuda_clock_ms(void* stream);
void emucuda_spend(void* stream, double called_ms, int product);
int emucuda_current_device(void);
size_t emucuda_used_memory(int device);
size_t emucuda_skip_above(void);  // see Settings::skip_above
size_t emucuda_move_up_to(size_t bytes);  // the same for this thread's copies from now on; returns what it was
void emucuda_zero(void* at, size_t bytes);  // zeros in memory; whole pages of it go back to the system
void emucuda_count_operator(int synchronises);
void emucuda_gemm(void* stream);  // a matrix product of no-compute mode
int emucuda_spend_host(int on);  // see HostTime

// CUPTI records what runs while a profiler is attached.
enum ActivityKind { ACTIVITY_KERNEL, ACTIVITY_COPY_TO_DEVICE, ACTIVITY_COPY_TO_HOST };
struct Activity {
  ActivityKind kind;
  const char* name;
  int device;
  unsigned stream;
  size_t bytes;
  uint32_t correlation;
  uint64_t begin, end;  // nanoseconds
};
struct Profiler {
  uint64_t (*now)(void);
  uint32_t (*launched)(ActivityKind kind, uint64_t begin, uint64_t end);  // returns the correlation number
  void (*finished)(const Activity*);
};
void emucuda_attach_profiler(const Profiler*);
const Profiler* emucuda_profiler(void);

// No-compute mode: the operators' library knows which bytes of the devices nobody computed.
struct Tracker {
  int (*is_skipped)(const void* at, size_t bytes);
  void (*skip)(void* at, size_t bytes, int floats);  // they are written from such bytes, or not at all
  void (*know)(void* at, size_t bytes);              // they are written from others
};
void emucuda_attach_tracker(const Tracker*);
const Tracker* emucuda_tracker(void);  // null in the computing mode
}

namespace emu {

// What a thread's processor time goes to. A GPU's host has the first alone.
enum HostTime {
  PROGRAM,
  COMPUTING,    // results that a GPU would compute, and copies that it would make
  BOOKKEEPING,  // of the emulation: which bytes were computed
  STREAMS,      // the streams' own threads, which stand for the device
};

// The time in its scope, and not in another's inside it, goes to this.
class Spend {
 public:
  explicit Spend(HostTime on) : before_(emucuda_spend_host(on)) {}
  ~Spend() { emucuda_spend_host(before_); }
  Spend(const Spend&) = delete;

 private:
  int before_;
};

// This thread's copies in its scope move up to so many bytes.
class MoveUpTo {
 public:
  explicit MoveUpTo(size_t bytes) : before_(emucuda_move_up_to(bytes)) {}
  ~MoveUpTo() { emucuda_move_up_to(before_); }
  MoveUpTo(const MoveUpTo&) = delete;

 private:
  size_t before_;
};

}  // namespace emu
