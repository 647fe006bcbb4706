// NCCL between processes of one machine. An operation runs on its stream's thread, after what the stream holds already.
#include "nccl_api.h"
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <thread>

#include "core.h"
#include "lost.h"
#include "nccl_communicator.h"
#include "nccl_reduce.h"
#include "settings.h"

using namespace emu;

namespace {

enum Kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECEIVE };
const char* const NAMES[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Send", "Recv"};

struct Operation {
  Kind kind;
  const char* from;
  char* to;
  size_t number;  // elements, of each rank's part
  ncclDataType_t type;
  int reduction;
  int peer;  // or the root
  ncclComm* comm;
  cudaStream_t stream;
  double scale = 1;
  size_t bytes_done = 0;  // of a message
  double ready_ms = 0;
  bool sends_stand_ins = false;  // no-compute mode: nobody computed what this rank sends
  bool is_skipped = false;       // and what it receives: it was marked so as the operation was called

  size_t bytes() const { return number * width_of(type); }
  bool in_parts() const { return kind == REDUCE_SCATTER || kind == ALL_TO_ALL; }
  size_t received_bytes() const { return bytes() * (kind == ALL_GATHER || kind == ALL_TO_ALL ? comm->ranks : 1); }
  bool sends() const { return from && (kind != BROADCAST || comm->rank == peer); }
  bool receives() const { return to && (kind != REDUCE || comm->rank == peer); }
  bool moves() const { return bytes() <= (is_wide_integer(type) ? 64 : 1) * emucuda_skip_above(); }
};

// What this rank sends, `number` elements from `begin` on.
void copy_sent(const Operation& op, char* to, size_t begin, size_t number) {
  if (op.sends_stand_ins) return fill_stand_ins(to, number, op.type);
  std::memcpy(to, op.from + begin * width_of(op.type), number * width_of(op.type));
}
// No-compute mode: what this rank receives was not computed.
void skip_received(const Operation& op) {
  if (const Tracker* tracker = emucuda_tracker()) tracker->skip(op.to, op.received_bytes(), is_float(op.type));
}
// The same as the operation is called, as far as this rank knows.
void track(Operation& op) {
  const Tracker* tracker = emucuda_tracker();
  if (!tracker) return;
  op.sends_stand_ins = op.sends() && tracker->is_skipped(op.from, op.bytes() * (op.in_parts() ? op.comm->ranks : 1));
  if (!op.receives()) return;
  op.is_skipped = op.sends_stand_ins || !op.moves();
  if (op.is_skipped)
    skip_received(op);
  else
    tracker->know(op.to, op.received_bytes());
}

bool ranks_agree(const Operation& op) {
  ncclComm& comm = *op.comm;
  for (int rank : comm.live) {
    const Call& call = comm.shared->calls[comm.index[rank]];
    bool rooted = op.kind == BROADCAST || op.kind == REDUCE;
    if (call.kind == op.kind && call.type == op.type && call.number == op.number && !(rooted && call.root != op.peer))
      continue;
    std::fprintf(stderr, "[emucuda] NCCL ranks disagree: rank %d calls %s of %zu (type %d), rank %d %s of %llu (type %d)\n",
                 comm.rank, NAMES[op.kind], op.number, op.type, rank, NAMES[call.kind], call.number, call.type);
    return false;
  }
  return true;
}

// One round: elements [begin, begin + number) of every rank's part, of which the slots hold `stride` elements' room.
void put(const Operation& op, size_t begin, size_t number, size_t stride) {
  ncclComm& comm = *op.comm;
  size_t width = width_of(op.type);
  char* slot = comm.slots[comm.rank];
  if (op.in_parts()) {
    for (int rank = 0; rank < comm.ranks; rank++)
      copy_sent(op, slot + rank * stride * width, rank * op.number + begin, number);
  } else if (op.sends()) {
    copy_sent(op, slot, begin, number);
  }
}
void take(const Operation& op, size_t begin, size_t number, size_t stride) {
  ncclComm& comm = *op.comm;
  size_t width = width_of(op.type), mine = comm.rank * stride * width;
  char* to = op.to + begin * width;
  switch (op.kind) {
    case REDUCE:
      if (comm.rank != op.peer) break;
      [[fallthrough]];
    case ALL_REDUCE: reduce(to, comm.slots, number, op.type, op.reduction, op.scale); break;
    case REDUCE_SCATTER: {
      std::vector<char*> parts;
      for (auto* slot : comm.slots) parts.push_back(slot + mine);
      reduce(to, parts, number, op.type, op.reduction, op.scale);
      break;
    }
    case BROADCAST:  // from a pretended rank comes what this one has
      std::memmove(to, comm.pretended(op.peer) ? op.from + begin * width : comm.slots[op.peer], number * width);
      break;
    case ALL_GATHER:
      for (int rank = 0; rank < comm.ranks; rank++)
        std::memcpy(op.to + (rank * op.number + begin) * width, comm.slots[rank], number * width);
      break;
    case ALL_TO_ALL:
      for (int rank = 0; rank < comm.ranks; rank++)
        std::memcpy(op.to + (rank * op.number + begin) * width, comm.slots[rank] + mine, number * width);
      break;
    default: break;
  }
}

// False: aborted, or the device was lost.
bool run_collective(Operation& op) {
  ncclComm& comm = *op.comm;
  comm.shared->calls[comm.index[comm.rank]] = {op.kind, op.type, op.peer, op.sends_stand_ins, op.number, op.ready_ms};
  if (!comm.meet(comm.shared->data)) return false;
  if (!ranks_agree(op)) {
    comm.error = ncclInvalidUsage;
    comm.aborted = true;
    return false;
  }
  for (int each : comm.live)
    op.ready_ms = std::max(op.ready_ms, comm.shared->calls[comm.index[each]].ready_ms);
  bool has_stand_ins = std::any_of(comm.live.begin(), comm.live.end(), [&](int each) {
    return comm.shared->calls[comm.index[each]].sends_stand_ins;
  });
  // Once alone: by now its memory may be another tensor's.
  if (has_stand_ins && op.receives() && !op.is_skipped) skip_received(op);
  size_t width = width_of(op.type);
  // None may write its next call before all have read this one; a collective of data meets below.
  if (!op.number || !op.moves()) return comm.meet(comm.shared->data);
  size_t stride = SLOT_BYTES / width / (op.in_parts() ? comm.ranks : 1);
  for (size_t begin = 0; begin < op.number; begin += stride) {
    size_t number = std::min(stride, op.number - begin);
    put(op, begin, number, stride);
    if (!comm.meet(comm.shared->data)) return false;
    take(op, begin, number, stride);
    if (!comm.meet(comm.shared->data)) return false;
  }
  return true;
}

bool whole(const Operation& op) { return op.bytes_done == op.bytes(); }

// Move a part of a message if its mailbox allows; whether it did.
bool move_message(Operation& op) {
  ncclComm& comm = *op.comm;
  bool sending = op.kind == SEND;
  Mailbox& mailbox = sending ? comm.mailbox(comm.rank, op.peer) : comm.mailbox(op.peer, comm.rank);
  if (whole(op) || mailbox.full != (sending ? 0u : 1u)) return false;
  if (sending) {
    size_t width = width_of(op.type), bytes = std::min(op.bytes() - op.bytes_done, MAIL_BYTES);
    if (op.moves()) copy_sent(op, mailbox.body(), op.bytes_done / width, bytes / width);
    mailbox.bytes = static_cast<uint32_t>(bytes);
    mailbox.has_stand_ins = op.sends_stand_ins;
    op.bytes_done += bytes;
    mailbox.ready_ms = op.ready_ms;
    mailbox.full = 1;
  } else {
    if (op.moves()) std::memcpy(op.to + op.bytes_done, mailbox.body(), mailbox.bytes);
    if (mailbox.has_stand_ins) skip_received(op);
    op.bytes_done += mailbox.bytes;
    op.ready_ms = std::max(op.ready_ms, mailbox.ready_ms);
    mailbox.full = 0;
  }
  comm.shared->mail++;
  wake_all(comm.shared->mail);
  return true;
}

// Messages to pretended ranks are dropped. From one comes what this rank sends to itself, if it does (an all-to-all),
// else stand-ins, or in the computing mode nothing.
void answer_for_pretended(ncclComm& comm, std::vector<Operation*>& messages) {
  const Operation* to_itself = nullptr;
  for (auto* op : messages)
    if (op->kind == SEND && op->peer == comm.rank) to_itself = op;
  for (auto* op : messages) {
    if (!comm.pretended(op->peer)) continue;
    op->bytes_done = op->bytes();
    if (op->kind != RECEIVE || !op->moves()) continue;
    if (to_itself) {
      copy_sent(*to_itself, op->to, 0, std::min(op->number, to_itself->number));
    } else if (emucuda_tracker()) {
      fill_stand_ins(op->to, op->number, op->type);
      skip_received(*op);
    }
  }
}

// All messages of a group at once; those of one peer and direction in order.
void run_messages(ncclComm& comm, std::vector<Operation*>& messages) {
  answer_for_pretended(comm, messages);
  while (!comm.aborted && !lost(comm.device)) {
    uint32_t movements = comm.shared->mail;
    bool moved = false, left = false;
    std::map<std::pair<int, int>, bool> waits;  // (kind, peer): an earlier message is not whole
    for (auto* op : messages) {
      bool& blocked = waits[{op->kind, op->peer}];
      if (blocked || whole(*op)) continue;
      moved |= move_message(*op);
      blocked = !whole(*op);
      left |= blocked;
    }
    if (!left) return;
    if (!moved) wait_while(comm.shared->mail, movements);
  }
}

struct Task {
  ncclComm* comm;
  unsigned long long ticket;
  cudaStream_t stream;
  std::vector<Operation> operations;
  uint32_t correlation;
  double called_ms;
};

void run(void* argument) {
  auto* task = static_cast<Task*>(argument);
  ncclComm& comm = *task->comm;
  {
    std::unique_lock<std::mutex> lock(comm.mutex);
    wait_unless_lost(comm.next_turn, lock, comm.device, [&] { return comm.turn == task->ticket || comm.aborted; });
  }
  const Profiler* profiler = emucuda_profiler();
  uint64_t begin = profiler ? profiler->now() : 0;
  std::vector<Operation*> messages;
  double ready = std::max(task->called_ms, emucuda_clock_ms(task->stream));
  for (auto& op : task->operations) {
    op.ready_ms = ready;
    if (op.kind == SEND || op.kind == RECEIVE)
      messages.push_back(&op);
    else if (comm.aborted || lost(comm.device) || !run_collective(op))
      break;
  }
  run_messages(comm, messages);
  for (auto& op : task->operations) ready = std::max(ready, op.ready_ms);
  emucuda_spend(task->stream, ready, 0);
  if (profiler) {
    std::string name = std::string("ncclDevKernel_") + NAMES[task->operations[0].kind];
    Activity done{ACTIVITY_KERNEL, name.c_str(), comm.device, emucuda_stream_id(task->stream), 0, task->correlation,
                  begin, profiler->now()};
    profiler->finished(&done);
  }
  delete task;
  std::lock_guard<std::mutex> lock(comm.mutex);
  comm.turn++;
  comm.next_turn.notify_all();
}

thread_local int group_depth = 0;
thread_local std::vector<Operation> group;

void submit_group() {
  std::vector<Task*> tasks;  // one for each communicator and stream
  for (auto& op : group) {
    auto same = [&](Task* task) { return task->comm == op.comm && task->stream == op.stream; };
    auto found = std::find_if(tasks.begin(), tasks.end(), same);
    if (found == tasks.end()) found = tasks.insert(found, new Task{op.comm, 0, op.stream, {}, 0, emucuda_now_ms()});
    (*found)->operations.push_back(op);
  }
  group.clear();
  const Profiler* profiler = emucuda_profiler();
  int chosen = emucuda_current_device();
  for (auto* task : tasks) {
    cudaSetDevice(task->comm->device);  // whose default stream it may be
    if (profiler) task->correlation = profiler->launched(ACTIVITY_KERNEL, profiler->now(), profiler->now());
    {
      std::lock_guard<std::mutex> lock(task->comm->mutex);
      task->ticket = task->comm->tickets++;
    }
    emucuda_enqueue(task->stream, run, task);
  }
  cudaSetDevice(chosen);
}

ncclResult_t call(Kind kind, const void* from, void* to, size_t number, ncclDataType_t type, int reduction, int peer,
                  ncclComm* comm, cudaStream_t stream) {
  if (!comm || peer < 0 || peer >= comm->ranks) return ncclInvalidArgument;
  if (lost(comm->device)) return ncclUnhandledCudaError;
  if (comm->error != ncclSuccess) return comm->error;  // an earlier operation's
  if (settings().trace)
    std::fprintf(stderr, "[emucuda] NCCL rank %d of %d: %s of %zu (type %d)\n", comm->rank, comm->ranks, NAMES[kind],
                 number, type);
  Operation op{kind, static_cast<const char*>(from), static_cast<char*>(to), number, type, reduction, peer, comm, stream};
  auto made = comm->scales.find(reduction);
  if (made != comm->scales.end()) {
    op.scale = made->second;
    op.reduction = ncclSum;
  }
  track(op);
  group.push_back(op);
  if (!group_depth) submit_group();
  return ncclSuccess;
}

}  // namespace

EMU_EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
EMU_EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                      "invalid argument", "invalid usage",
                                      "remote process exited or there was a network error", "NCCL operation in progress"};
  return result < ncclNumResults ? texts[result] : "unknown result code";
}
EMU_EXPORT const char* ncclGetLastError(ncclComm_t comm) {
  return comm && lost(comm->device) ? "Cuda failure 'unknown error'" : "";
}

EMU_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  std::random_device random;
  std::snprintf(id->internal, sizeof id->internal, "%d-%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  return ncclComm::make(made, id.internal, ranks, rank, nullptr);
}
EMU_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank,
                                               ncclConfig_t* config) {
  return ncclComm::make(made, id.internal, ranks, rank, config);
}
EMU_EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int, ncclUniqueId* ids,
                                                 ncclConfig_t* config) {
  return ncclComm::make(made, ids[0].internal, ranks, rank, config);
}
// A process with a rank on each of its devices, as nn.DataParallel has. Ranks meet while they are made, each in a thread.
EMU_EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* made, int ranks, const int* devices) {
  int visible = settings().devices();
  auto is_missing = [&](int device) { return device < 0 || device >= visible; };
  if (ranks < 1 || (devices ? std::any_of(devices, devices + ranks, is_missing) : ranks > visible))
    return ncclInvalidArgument;
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<ncclResult_t> results(ranks, ncclSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; rank++)
    threads.emplace_back([&, rank] {
      cudaSetDevice(devices ? devices[rank] : rank);
      results[rank] = ncclComm::make(&made[rank], id.internal, ranks, rank, nullptr);
    });
  for (auto& thread : threads) thread.join();
  return *std::max_element(results.begin(), results.end());
}
// Of a communicator with pretended ranks: which of them join a part is not known here, so the part's name tells its size
// and its live ranks; `key` is the rank in it, as torch numbers them.
static ncclResult_t split_pretending(ncclComm_t comm, int color, int key, ncclComm_t* made, const ncclConfig_t* config) {
  int split = comm->splits++, size = 0;
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::string name = config && config->netName ? config->netName : "";
  if (name == comm->name || std::sscanf(name.c_str(), "shardkit-live:%d:", &size) != 1) {
    std::fprintf(stderr, "[emucuda] ncclCommSplit: the size of the part is not known, as ranks are pretended\n");
    return ncclInvalidUsage;
  }
  return ncclComm::make(made, comm->id + "s" + std::to_string(split) + "c" + std::to_string(color), size, key, config);
}
EMU_EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  if (comm->pretends()) return split_pretending(comm, color, key, made, config);
  Shared& shared = *comm->shared;
  shared.color[comm->rank] = color;
  shared.key[comm->rank] = key;
  if (!comm->meet(shared.host)) return ncclSystemError;
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int rank = 0; rank < comm->ranks; rank++)
    if (shared.color[rank] == color) members.emplace_back(shared.key[rank], rank);
  int split = comm->splits++;
  if (!comm->meet(shared.host)) return ncclSystemError;
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(members.begin(), members.end());
  auto me = std::find_if(members.begin(), members.end(), [&](auto& member) { return member.second == comm->rank; });
  return ncclComm::make(made, comm->id + "s" + std::to_string(split) + "c" + std::to_string(color),
                        static_cast<int>(members.size()), static_cast<int>(me - members.begin()), nullptr);
}
EMU_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
EMU_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  comm->close();
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm) comm->abort();
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = lost(comm->device) ? ncclUnhandledCudaError : comm->error.load();
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) {
  *ranks = comm->ranks;
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void*, size_t, void** handle) {
  *handle = comm;
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
EMU_EXPORT ncclResult_t ncclMemAlloc(void** address, size_t bytes) {
  return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
EMU_EXPORT ncclResult_t ncclMemFree(void* address) {
  return cudaFree(address) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
EMU_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* made, void* scalar, ncclDataType_t type,
                                                 ncclScalarResidence_t, ncclComm_t comm) {
  double scale;
  switch (type) {
    case ncclFloat64: scale = *static_cast<double*>(scalar); break;
    case ncclFloat32: scale = *static_cast<float*>(scalar); break;
    case ncclFloat16: scale = static_cast<Float16*>(scalar)->value(); break;
    case ncclBfloat16: scale = static_cast<Bfloat16*>(scalar)->value(); break;
    default: return ncclInvalidArgument;
  }
  int operation = ncclNumOps + 1 + static_cast<int>(comm->scales.size());
  comm->scales[operation] = scale;
  *made = static_cast<ncclRedOp_t>(operation);
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
EMU_EXPORT ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}
EMU_EXPORT ncclResult_t ncclGroupEnd() {
  if (group_depth <= 0) return ncclInvalidUsage;
  if (--group_depth == 0) submit_group();
  return ncclSuccess;
}

EMU_EXPORT ncclResult_t ncclAllReduce(const void* from, void* to, size_t number, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
  return call(ALL_REDUCE, from, to, number, type, op, 0, comm, stream);
}
EMU_EXPORT ncclResult_t ncclReduce(const void* from, void* to, size_t number, ncclDataType_t type, ncclRedOp_t op,
                                   int root, ncclComm_t comm, cudaStream_t stream) {
  return call(REDUCE, from, to, number, type, op, root, comm, stream);
}
EMU_EXPORT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t number, ncclDataType_t type,
                                          ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(REDUCE_SCATTER, from, to, number, type, op, 0, comm, stream);
}
EMU_EXPORT ncclResult_t ncclAllGather(const void* from, void* to, size_t number, ncclDataType_t type, ncclComm_t comm,
                                      cudaStream_t stream) {
  return call(ALL_GATHER, from, to, number, type, ncclSum, 0, comm, stream);
}
EMU_EXPORT ncclResult_t ncclBroadcast(const void* from, void* to, size_t number, ncclDataType_t type, int root,
                                      ncclComm_t comm, cudaStream_t stream) {
  return call(BROADCAST, from, to, number, type, ncclSum, root, comm, stream);
}
EMU_EXPORT ncclResult_t ncclBcast(void* buffer, size_t number, ncclDataType_t type, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
  return call(BROADCAST, buffer, buffer, number, type, ncclSum, root, comm, stream);
}
EMU_EXPORT ncclResult_t ncclAlltoAll(const void* from, void* to, size_t number, ncclDataType_t type, ncclComm_t comm,
                                     cudaStream_t stream) {
  return call(ALL_TO_ALL, from, to, number, type, ncclSum, 0, comm, stream);
}
EMU_EXPORT ncclResult_t ncclSend(const void* from, size_t number, ncclDataType_t type, int peer, ncclComm_t comm,
                                 cudaStream_t stream) {
  return call(SEND, from, nullptr, number, type, ncclSum, peer, comm, stream);
}
EMU_EXPORT ncclResult_t ncclRecv(void* to, size_t number, ncclDataType_t type, int peer, ncclComm_t comm,
                                 cudaStream_t stream) {
  return call(RECEIVE, nullptr, to, number, type, ncclSum, peer, comm, stream);
}
