// EMUCUDA_RECORD=FILE: each operator, and each block that the caching allocator gives or takes back, one a line, in
// FILE.RANK (FILE.PID in a process without a rank).
// EMUCUDA_TRACE_OPS=1: operators on stderr.
#pragma once
#include <string>

namespace emu {

// The scope of an operator: what is allocated in it is written below it. Those that it calls itself are not.
class Recorded {
 public:
  explicit Recorded(const std::string& name);
  ~Recorded();
  Recorded(const Recorded&) = delete;
};

}  // namespace emu
