// cuBLAS and cuBLASLt (-DLT) of the no-compute mode: handles, descriptors, and products that only count.
// The build makes every function that is not here return success.
#include <cstddef>
#include <cstring>

#include "core.h"
#include "settings.h"

struct Handle {  // the stubs of the build read its stream
  void* stream;
  int math_mode;
};
static const int SUCCESS = 0;

#ifdef LT
struct Heuristic {
  unsigned long long algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
// Descriptors are opaque and at most 1 KiB; the layout and preference calls that fill them do nothing.
static int descriptor(void** made) {
  *made = std::calloc(1, 1024);
  return SUCCESS;
}
static int freed(void* made) {
  std::free(made);
  return SUCCESS;
}
EMU_EXPORT int cublasLtCreate(void** made) { return descriptor(made); }
EMU_EXPORT size_t cublasLtGetVersion(void) { return 130101; }
EMU_EXPORT int cublasLtMatmulDescCreate(void** made) { return descriptor(made); }
EMU_EXPORT int cublasLtMatmulDescDestroy(void* made) { return freed(made); }
EMU_EXPORT int cublasLtMatrixLayoutCreate(void** made) { return descriptor(made); }
EMU_EXPORT int cublasLtMatrixLayoutDestroy(void* made) { return freed(made); }
EMU_EXPORT int cublasLtMatmulPreferenceCreate(void** made) { return descriptor(made); }
EMU_EXPORT int cublasLtMatmulPreferenceDestroy(void* made) { return freed(made); }
EMU_EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* found,
                                              int* number) {
  std::memset(found, 0, sizeof *found);
  *number = 1;
  return SUCCESS;
}
EMU_EXPORT int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                              const void*, void*, void*, void*, const void*, void*, size_t, void* stream) {
  emucuda_gemm(stream);
  return SUCCESS;
}
#else
EMU_EXPORT int cublasCreate_v2(Handle** made) {
  *made = new Handle{};
  return SUCCESS;
}
EMU_EXPORT int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return SUCCESS;
}
EMU_EXPORT int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return SUCCESS;
}
EMU_EXPORT int cublasGetStream_v2(Handle* handle, void** stream) {
  *stream = handle->stream;
  return SUCCESS;
}
EMU_EXPORT int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return SUCCESS;
}
EMU_EXPORT int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return SUCCESS;
}
EMU_EXPORT int cublasGetPointerMode_v2(Handle*, int* mode) {
  *mode = 0;
  return SUCCESS;
}
EMU_EXPORT int cublasGetVersion_v2(Handle*, int* version) {
  *version = 130101;
  return SUCCESS;
}
#endif
