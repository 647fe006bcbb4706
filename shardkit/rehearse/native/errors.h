// The last error of each thread, as cudaGetLastError reports it.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

namespace emu {
// Remembers and returns it; `detail` goes into the text that torch's exception shows.
cudaError_t failed(cudaError_t error, const std::string& detail = "");
}  // namespace emu
