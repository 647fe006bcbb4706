#include "account.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "settings.h"

namespace emu {

static std::mutex& mutex() {
  static auto* one = new std::mutex;
  return *one;
}

// Threads of this process by the mutex, processes by a record lock: unlike a mutex in shared memory, the kernel gives
// it back when its holder is killed, and unlike flock a forked child does not inherit it.
class Locked {
 public:
  explicit Locked(int file) : lock_(mutex()), file_(file) { set(F_WRLCK); }
  ~Locked() { set(F_UNLCK); }

 private:
  void set(short type) {
    struct flock whole = {};
    whole.l_type = type;
    whole.l_whence = SEEK_SET;
    while (file_ >= 0 && fcntl(file_, F_SETLKW, &whole) && errno == EINTR) {
    }
  }
  std::lock_guard<std::mutex> lock_;
  int file_;
};

Account& account() {
  static Account* one = new Account;
  return *one;
}

Account::Account() {
  void* mapped = MAP_FAILED;
  if (const char* path = std::getenv("EMUCUDA_ACCOUNT")) {
    const char* machine = std::getenv("EMUCUDA_MACHINE");
    std::string name = std::string(path) + "." + (machine && *machine ? machine : "0");
    file_ = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ >= 0 && !ftruncate(file_, sizeof(Ledger)))
      mapped = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) {
      std::fprintf(stderr, "[emucuda] %s cannot be mapped: the memory of cards cannot be shared\n", name.c_str());
      std::abort();  // a verdict without the other processes would be wrong
    }
  } else {
    mapped = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  ledger_ = static_cast<Ledger*>(mapped);
}

// This process's entry; null in the forked child of a process that used CUDA, whose memory is its parent's.
Ledger::Process* Account::own() {
  auto pid = static_cast<uint64_t>(getpid());
  if (process_) return pid == pid_ ? process_ : nullptr;
  pid_ = pid;
  for (auto& process : ledger_->processes)
    if (!process.pid) {
      process.pid = pid;
      return process_ = &process;
    }
  std::fprintf(stderr, "[emucuda] more than %d processes have used the cards\n", MAX_PROCESSES);
  std::abort();
}

// Whether a process has ended. One that waits to be reaped has given its memory back, too.
static bool has_ended(uint64_t pid) {
  if (kill(static_cast<pid_t>(pid), 0) && errno == ESRCH) return true;
  char path[32], line[512] = "";
  std::snprintf(path, sizeof path, "/proc/%llu/stat", static_cast<unsigned long long>(pid));
  if (FILE* file = std::fopen(path, "r")) {
    if (!std::fgets(line, sizeof line, file)) line[0] = 0;
    std::fclose(file);
  }
  const char* name_end = std::strrchr(line, ')');
  return name_end && name_end[1] && (name_end[2] == 'Z' || name_end[2] == 'X');
}

// A process that was killed cannot give its memory back: others do it before they look at the sum.
void Account::drop_ended() {
  for (auto& process : ledger_->processes) {
    if (!process.pid) break;  // entries are filled in order and never given to another process
    if (&process == process_ || !std::any_of(process.used, process.used + MAX_CARDS, [](uint64_t n) { return n; }))
      continue;
    if (!has_ended(process.pid)) continue;
    for (int card = 0; card < MAX_CARDS; card++) {
      ledger_->cards[card].used -= process.used[card];
      process.used[card] = 0;
    }
  }
}

void Account::add(Ledger::Process* process, int card, size_t bytes) {
  auto& total = ledger_->cards[card];
  process->used[card] += bytes;
  total.used += bytes;
  if (total.used <= total.peak) return;
  drop_ended();
  if (total.used <= total.peak) return;
  total.peak = total.used;
  for (auto& each : ledger_->processes) {
    if (!each.pid) break;
    each.at_peak[card] = each.used[card];
  }
}

bool Account::take(int card, size_t bytes) {
  touch(card);
  Locked lock(file_);
  Ledger::Process* process = own();
  if (!process) return true;
  auto is_full = [&] { return bytes > settings().memory || ledger_->cards[card].used > settings().memory - bytes; };
  if (is_full()) drop_ended();
  if (is_full()) return false;
  add(process, card, bytes);
  return true;
}

void Account::give(int card, size_t bytes) {
  Locked lock(file_);
  Ledger::Process* process = own();
  if (!process) return;
  process->used[card] -= bytes;
  ledger_->cards[card].used -= bytes;
}

void Account::touch(int card) {
  if (touched_[card]) return;
  Locked lock(file_);
  Ledger::Process* process = own();
  if (!process || touched_[card]) return;
  touched_[card] = true;
  add(process, card, settings().context);
}

size_t Account::used(int card) {
  Locked lock(file_);
  drop_ended();
  return ledger_->cards[card].used;
}

size_t Account::held(int card, int index, unsigned* pid) {
  Locked lock(file_);
  for (auto& process : ledger_->processes) {
    if (!process.pid) break;
    if (!process.used[card] || index--) continue;
    *pid = static_cast<unsigned>(process.pid);
    return process.used[card];
  }
  return 0;
}

}  // namespace emu

EMU_EXPORT void emucuda_touch(int device) {
  if (device >= 0 && device < emu::settings().devices()) emu::account().touch(emu::settings().visible[device]);
}
EMU_EXPORT size_t emucuda_card_used(int card) { return emu::account().used(card); }
EMU_EXPORT size_t emucuda_card_held(int card, int index, unsigned* pid) { return emu::account().held(card, index, pid); }
