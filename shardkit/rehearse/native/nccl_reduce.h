// Sums, products, minima, maxima and averages over the ranks' buffers, in rank order and float32 for half precision.
#pragma once
#include "nccl_api.h"

#include <cstdint>
#include <cstring>
#include <vector>

namespace emu {

inline size_t width_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat64: case ncclInt64: case ncclUint64: return 8;
    case ncclFloat32: case ncclInt32: case ncclUint32: return 4;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
  }
}

inline bool is_float(ncclDataType_t type) {
  return type == ncclFloat64 || type == ncclFloat32 || type == ncclFloat16 || type == ncclBfloat16;
}
// Integers that a program decides by. Weights of four bits are packed in narrower ones.
inline bool is_wide_integer(ncclDataType_t type) { return type == ncclInt64 || type == ncclUint64; }

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct Bfloat16 {
  uint16_t raw;
  float value() const { return bits<float>(static_cast<uint32_t>(raw) << 16); }
  static Bfloat16 of(float value) {
    if (value != value) return {0x7fc0};
    auto word = bits<uint32_t>(value);
    return {static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16)};  // to nearest, ties to even
  }
};
// The compiler's type where it has one would need a newer compiler than torch does.
struct Float16 {
  uint16_t raw;
  float value() const {
    uint32_t sign = (raw & 0x8000u) << 16, exponent = (raw >> 10) & 31, mantissa = raw & 1023;
    if (exponent == 31) return bits<float>(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  static Float16 of(float value) {
    auto word = bits<uint32_t>(value);
    uint32_t sign = (word >> 16) & 0x8000, size = word & 0x7fffffff;
    uint32_t half;
    if (size > 0x7f800000)
      half = 0x7e00;  // not a number
    else if (size >= 0x477ff000)
      half = 0x7c00;  // 65520 and above round to infinity
    else if (size < 0x38800000)  // subnormal: adding 0.5 leaves units of 2^-24 in the low bits
      half = bits<uint32_t>(bits<float>(size) + 0.5f) - 0x3f000000;
    else
      half = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
    return {static_cast<uint16_t>(sign | half)};
  }
};
template <class T>
struct Plain {
  T raw;
  T value() const { return raw; }
  static Plain of(T value) { return {value}; }
};

template <class Element>
void reduce_as(char* out, const std::vector<char*>& ranks, size_t number, int operation, double scale) {
  auto* results = reinterpret_cast<Element*>(out);
  for (size_t i = 0; i < number; i++) {
    auto total = reinterpret_cast<Element*>(ranks[0])[i].value();
    for (size_t rank = 1; rank < ranks.size(); rank++) {
      auto next = reinterpret_cast<Element*>(ranks[rank])[i].value();
      switch (operation) {
        case ncclProd: total *= next; break;
        case ncclMax: total = next > total ? next : total; break;
        case ncclMin: total = next < total ? next : total; break;
        default: total += next;
      }
    }
    if (operation == ncclAvg) total /= static_cast<decltype(total)>(ranks.size());
    if (scale != 1) total = static_cast<decltype(total)>(total * scale);
    results[i] = Element::of(total);
  }
}

inline void reduce(char* out, const std::vector<char*>& ranks, size_t number, ncclDataType_t type, int operation,
                   double scale) {
  switch (type) {
    case ncclFloat64: return reduce_as<Plain<double>>(out, ranks, number, operation, scale);
    case ncclFloat32: return reduce_as<Plain<float>>(out, ranks, number, operation, scale);
    case ncclFloat16: return reduce_as<Float16>(out, ranks, number, operation, scale);
    case ncclBfloat16: return reduce_as<Bfloat16>(out, ranks, number, operation, scale);
    case ncclInt64: return reduce_as<Plain<int64_t>>(out, ranks, number, operation, scale);
    case ncclUint64: return reduce_as<Plain<uint64_t>>(out, ranks, number, operation, scale);
    case ncclInt32: return reduce_as<Plain<int32_t>>(out, ranks, number, operation, scale);
    case ncclUint32: return reduce_as<Plain<uint32_t>>(out, ranks, number, operation, scale);
    case ncclInt8: return reduce_as<Plain<int8_t>>(out, ranks, number, operation, scale);
    default: return reduce_as<Plain<uint8_t>>(out, ranks, number, operation, scale);
  }
}

// Ones where they are floats (zero has no logarithm), else zeros.
inline void fill_stand_ins(char* at, size_t number, ncclDataType_t type) {
  auto fill = [&](auto one) {
    for (size_t i = 0; i < number; i++) reinterpret_cast<decltype(one)*>(at)[i] = one;
  };
  switch (type) {
    case ncclFloat64: return fill(1.0);
    case ncclFloat32: return fill(1.0f);
    case ncclFloat16: return fill(Float16::of(1).raw);
    case ncclBfloat16: return fill(Bfloat16::of(1).raw);
    default: std::memset(at, 0, number * width_of(type));
  }
}

}  // namespace emu
