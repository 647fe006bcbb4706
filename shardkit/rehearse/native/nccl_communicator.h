// What the ranks of a communicator share: memory in which they meet and through which bytes move.
#pragma once
#include "nccl_api.h"

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace emu {

const size_t SLOT_BYTES = 1 << 20;  // each rank's part of a collective, at a time
const size_t MAIL_BYTES = 1 << 20;  // a message's part, at a time
const int MAX_RANKS = 64;  // that are processes

// Sleep while `word` is `value`; wakes up by itself now and then, so that a caller can look whether it was aborted.
void wait_while(std::atomic<uint32_t>& word, uint32_t value);
void wake_all(std::atomic<uint32_t>& word);

struct Barrier {
  std::atomic<uint32_t> arrived, generation;
};
struct Call {  // what a rank is about to do, for the others to compare
  int kind, type, root;
  bool sends_stand_ins;  // no-compute mode: nobody computed what it sends
  unsigned long long number;
  double ready_ms;  // in virtual time (streams.h): when its stream is there
};
struct Shared {
  Barrier data, host;
  std::atomic<uint32_t> mail;  // counts the movements of messages
  Call calls[MAX_RANKS];
  int color[MAX_RANKS], key[MAX_RANKS];
};
struct Mailbox {
  std::atomic<uint32_t> full;
  uint32_t bytes;
  bool has_stand_ins;
  double ready_ms;  // the sender's
  char* body() { return reinterpret_cast<char*>(this + 1); }
};

}  // namespace emu

struct ncclComm {
  std::string id, name;  // `name`: the config's, which tells the live ranks
  int ranks, rank, device;
  std::vector<int> live;   // ranks that are processes; the others are pretended
  std::vector<int> index;  // of each rank among the live ones; -1: pretended
  emu::Shared* shared;
  std::vector<char*> slots;  // of each rank; a pretended one has that of the live rank before it, else of the first
  char* mailboxes;

  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> error{ncclSuccess};
  std::mutex mutex;
  std::condition_variable next_turn;
  unsigned long long tickets = 0, turn = 0;  // operations run in the order of their calls, whatever their streams
  int splits = 0;
  std::map<int, double> scales;  // of the operations that ncclRedOpCreatePreMulSum made

  bool pretended(int rank) const { return index[rank] < 0; }
  bool pretends() const { return live.size() < index.size(); }

  static ncclResult_t make(ncclComm** made, const std::string& id, int ranks, int rank, const ncclConfig_t* config);
  void close();
  void abort();
  bool meet(emu::Barrier& barrier);  // false: aborted, or the device was lost
  emu::Mailbox& mailbox(int from, int to);
};
