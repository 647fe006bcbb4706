// No-compute mode: which bytes of the devices mean something.
#pragma once
#include "bridge.h"

namespace emu {

enum class Validity {
  computed,
  stand_in,  // ones, where the values of a tiny tensor depend on data that was skipped
  skipped,   // whatever lies there
};

// Of a CUDA tensor's bytes; of several, the worst.
Validity validity(const Tensor& tensor);
void mark(const Tensor& tensor, Validity now);

// Counts what a collective or a message brought that nobody computed: that is known once it has arrived.
unsigned arrivals();

// Integers and booleans: a program decides by them.
bool decides(const Tensor& tensor);
// Quantised floats, or the bytes of another tensor: a program keeps them, and decides by none.
bool is_bytes(const Tensor& tensor);
// As many bytes, or integers of 32 bits, as weights of four bits are packed in: they do not move, as floats do not.
bool is_weights(const Tensor& tensor);
// Small enough for the CPU: EMUCUDA_SKIP_ABOVE bytes, and 64 times that where it decides.
bool is_small(const Tensor& tensor);
// Small enough for stand-ins: a 16th of that, as losses and norms are. Pages of shards and activations stay untouched.
bool is_tiny(const Tensor& tensor);
// A result that was not computed: ones where it is tiny and does not decide (zero has no logarithm).
void leave(const Tensor& tensor);

}  // namespace emu
