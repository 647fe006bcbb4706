// The account of each card: bytes that every process of the machine holds of it, in a file that all of them map.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

const int MAX_CARDS = 64, MAX_PROCESSES = 1024;

// EMUCUDA_ACCOUNT.MACHINE, zeros at first; rehearse/cards.py reads it. Without that variable a process has its own.
struct Ledger {
  struct Card {
    uint64_t used, peak;
  } cards[MAX_CARDS];
  struct Process {
    uint64_t pid;
    uint64_t used[MAX_CARDS], at_peak[MAX_CARDS];  // the second: when its card was fullest
  } processes[MAX_PROCESSES];
};

// Cards are the machine's, whatever CUDA_VISIBLE_DEVICES says.
class Account {
 public:
  Account();
  bool take(int card, size_t bytes);  // false when the card is full
  void give(int card, size_t bytes);
  void touch(int card);  // this process's context on it, once
  bool is_touched(int card) const { return touched_[card]; }
  size_t used(int card);  // of all processes
  size_t held(int card, int index, unsigned* pid);  // of the index-th process that holds any; 0 past the last

 private:
  Ledger::Process* own();
  void drop_ended();
  void add(Ledger::Process* process, int card, size_t bytes);

  Ledger* ledger_;
  int file_ = -1;
  uint64_t pid_ = 0;
  Ledger::Process* process_ = nullptr;
  bool touched_[MAX_CARDS] = {};
};

Account& account();

}  // namespace emu

extern "C" {
void emucuda_touch(int device);  // as the program numbers it
size_t emucuda_card_used(int card);
size_t emucuda_card_held(int card, int index, unsigned* pid);
}
