#include "nccl_communicator.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

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

// Ranks of a communicator that are processes: those that the config's network name lists, `shardkit-live:SIZE:0,64;…`.
// Without such a name all are, as they are where two of a group talk in a communicator of their own.
static std::vector<int> live_ranks(int ranks, const std::string& name) {
  std::vector<int> live;
  int size = 0, offset = 0;
  if (std::sscanf(name.c_str(), "shardkit-live:%d:%n", &size, &offset) == 1 && offset && size == ranks) {
    for (const char* at = name.c_str() + offset; *at && *at != ';'; at += *at == ',') {
      char* end;
      int rank = static_cast<int>(std::strtol(at, &end, 10));
      if (end == at) break;
      live.push_back(rank);
      at = end;
    }
  } else {
    for (int rank = 0; rank < ranks; rank++) live.push_back(rank);
  }
  return live;
}

}  // namespace emu

using namespace emu;

ncclResult_t ncclComm::make(ncclComm** made, const std::string& id, int ranks, int rank, const ncclConfig_t* config) {
  std::string name = config && config->netName ? config->netName : "";
  std::vector<int> live = live_ranks(ranks, name);
  int number = static_cast<int>(live.size());
  if (number > MAX_RANKS || rank < 0 || !std::count(live.begin(), live.end(), rank) || live.back() >= ranks)
    return ncclInvalidArgument;
  auto* comm = new ncclComm;
  comm->id = id;
  comm->name = name;
  comm->ranks = ranks;
  comm->rank = rank;
  comm->device = emucuda_current_device();
  comm->live = live;
  comm->index.assign(ranks, -1);
  for (int each = 0; each < number; each++) comm->index[live[each]] = each;
  comm->shared = reinterpret_cast<Shared*>(map_shared(id, PARTS[0], sizeof(Shared)));
  char* slots = map_shared(id, PARTS[1], SLOT_BYTES * number);
  comm->mailboxes = map_shared(id, PARTS[2], mailboxes_size(number));
  if (!comm->shared || !slots || !comm->mailboxes) return ncclSystemError;
  for (int each = 0, stand_in = 0; each < ranks; each++) {
    if (!comm->pretended(each)) stand_in = comm->index[each];
    comm->slots.push_back(slots + SLOT_BYTES * stand_in);
  }
  // Once all have them mapped, the files' names can go.
  if (!comm->meet(comm->shared->host)) return ncclSystemError;
  if (rank == live[0])
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
  int number = static_cast<int>(live.size());
  munmap(slots[0], SLOT_BYTES * number);
  munmap(mailboxes, mailboxes_size(number));
}

void ncclComm::abort() {
  aborted = true;
  std::lock_guard<std::mutex> lock(mutex);
  next_turn.notify_all();
}

bool ncclComm::meet(Barrier& barrier) {
  uint32_t generation = barrier.generation;
  if (barrier.arrived.fetch_add(1) + 1 == static_cast<uint32_t>(live.size())) {
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
  return *reinterpret_cast<Mailbox*>(mailboxes + (sizeof(Mailbox) + MAIL_BYTES) * (index[from] * live.size() + index[to]));
}
