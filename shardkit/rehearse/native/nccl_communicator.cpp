#include "nccl_communicator.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core.h"
#include "lost.h"

namespace emu {

void wait_while(std::atomic<uint32_t>& word, uint32_t value) {
  timespec limit{0, 20'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, MAX_RANKS * MAX_RANKS, nullptr, nullptr, 0);
}

static std::string file_of(const std::string& id, const char* part) { return "/emunccl-" + id + part; }
static char* map_shared(const std::string& id, const char* part, size_t bytes) {
  // A new file is zeros, and only pages that are written take memory.
  int file = shm_open(file_of(id, part).c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0) return nullptr;
  void* at = ftruncate(file, static_cast<off_t>(bytes)) ? MAP_FAILED
                                                        : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}
static size_t mailboxes_size(int ranks) { return (sizeof(Mailbox) + MAIL_BYTES) * ranks * ranks; }
static const char* const PARTS[] = {"", "-slots", "-mail"};

}  // namespace emu

using namespace emu;

ncclResult_t ncclComm::make(ncclComm** made, const std::string& id, int ranks, int rank) {
  if (ranks > MAX_RANKS || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  auto* comm = new ncclComm;
  comm->id = id;
  comm->ranks = ranks;
  comm->rank = rank;
  comm->device = emucuda_current_device();
  comm->shared = reinterpret_cast<Shared*>(map_shared(id, PARTS[0], sizeof(Shared)));
  char* slots = map_shared(id, PARTS[1], SLOT_BYTES * ranks);
  comm->mailboxes = map_shared(id, PARTS[2], mailboxes_size(ranks));
  if (!comm->shared || !slots || !comm->mailboxes) return ncclSystemError;
  for (int each = 0; each < ranks; each++) comm->slots.push_back(slots + SLOT_BYTES * each);
  // Once all have them mapped, the files' names can go.
  if (!comm->meet(comm->shared->host)) return ncclSystemError;
  if (rank == 0)
    for (auto* part : PARTS) shm_unlink(file_of(id, part).c_str());
  *made = comm;
  return ncclSuccess;
}

void ncclComm::close() {
  {
    std::unique_lock<std::mutex> lock(mutex);
    wait_unless_lost(next_turn, lock, device, [this] { return turn == tickets || aborted; });
  }
  if (aborted || lost(device)) return;  // a thread may still be inside
  munmap(shared, sizeof(Shared));
  munmap(slots[0], SLOT_BYTES * ranks);
  munmap(mailboxes, mailboxes_size(ranks));
}

void ncclComm::abort() {
  aborted = true;
  std::lock_guard<std::mutex> lock(mutex);
  next_turn.notify_all();
}

bool ncclComm::meet(Barrier& barrier) {
  uint32_t generation = barrier.generation;
  if (barrier.arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks)) {
    barrier.arrived = 0;
    barrier.generation++;
    wake_all(barrier.generation);
    return true;
  }
  while (barrier.generation == generation) {
    if (aborted || lost(device)) return false;
    wait_while(barrier.generation, generation);
  }
  return true;
}

Mailbox& ncclComm::mailbox(int from, int to) {
  return *reinterpret_cast<Mailbox*>(mailboxes + (sizeof(Mailbox) + MAIL_BYTES) * (from * ranks + to));
}
