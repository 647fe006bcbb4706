// NCCL's declarations without CUDA's half types, of which they use none: those headers need CCCL, which is in no wheel
// that torch depends on.
#pragma once
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#define __CUDA_BF16_TYPES_EXIST__  // older releases of NCCL have ncclBfloat16 only then
#include <nccl.h>
