// Runtime API: errors, and their names and texts as CUDA prints them.
#include "errors.h"

#include "settings.h"

namespace emu {
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local cudaError_t detailed_error = cudaSuccess;
static thread_local std::string detailed_text;

cudaError_t failed(cudaError_t error, const std::string& detail) {
  detailed_error = detail.empty() ? cudaSuccess : error;
  detailed_text = detail;
  return last_error = error;
}
}  // namespace emu

using namespace emu;

struct ErrorText {
  cudaError_t code;
  const char *name, *text;
};
#define ERROR(code, text) {code, #code, text}
static const ErrorText ERRORS[] = {
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInitializationError, "initialization error"),
    ERROR(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ERROR(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    ERROR(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR(cudaErrorUnknown, "unknown error"),
};
static const ErrorText& text_of(cudaError_t error) {
  const ErrorText* unknown = ERRORS + sizeof ERRORS / sizeof *ERRORS - 1;
  for (auto* entry = ERRORS; entry < unknown; entry++)
    if (entry->code == error) return *entry;
  return *unknown;
}

EMU_EXPORT const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
EMU_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  return error != cudaSuccess && error == detailed_error ? detailed_text.c_str() : text_of(error).text;
}
EMU_EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EMU_EXPORT cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
