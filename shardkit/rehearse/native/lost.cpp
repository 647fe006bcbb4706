#include "lost.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "settings.h"

namespace emu {

// EMUCUDA_LOST=2:FILE: the third device of the machine is lost once FILE exists.
struct Choice {
  int number = -1;
  std::string file;
  std::atomic<bool> happened{false};

  Choice() {
    const char* text = std::getenv("EMUCUDA_LOST");
    if (!text || !*text) return;
    char* end;
    number = static_cast<int>(std::strtol(text, &end, 10));
    if (*end == ':') file = end + 1;
  }
  bool has_happened() {
    if (!happened && access(file.c_str(), F_OK) == 0) happened = true;  // it does not come back
    return happened;
  }
};
static Choice& choice() {
  static Choice* read = new Choice;
  return *read;
}

}  // namespace emu

using namespace emu;

EMU_EXPORT int emucuda_can_be_lost(int device) {
  return device >= 0 && device < settings().devices() && settings().visible[device] == choice().number;
}
EMU_EXPORT int emucuda_lost(int device) { return emucuda_can_be_lost(device) && choice().has_happened(); }
EMU_EXPORT int emucuda_physical_lost(int number) {
  return number >= 0 && number == choice().number && choice().has_happened();
}
