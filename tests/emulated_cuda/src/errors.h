// The last error of each thread, as cudaGetLastError reports it.
#pragma once
#include <cuda_runtime_api.h>

namespace emu {
cudaError_t failed(cudaError_t error);  // remembers and returns it
}  // namespace emu
