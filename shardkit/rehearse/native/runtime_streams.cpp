// Runtime API: streams and events.
#include <cuda_runtime_api.h>

#include "core.h"
#include "counters.h"
#include "errors.h"
#include "lost.h"
#include "settings.h"
#include "streams.h"

using namespace emu;

EMU_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  EMU_NEEDS(current_device());
  *made = reinterpret_cast<cudaStream_t>(make_stream(flags, priority));
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}
EMU_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
EMU_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (is_default_stream(stream)) return failed(cudaErrorInvalidResourceHandle);
  stream_of(stream)->destroy();
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  EMU_NEEDS(stream_of(stream)->device);
  count(Counter::stream_sync);
  if (capturing(stream_of(stream))) return failed(cudaErrorStreamCaptureUnsupported);
  return stream_of(stream)->synchronise() ? cudaSuccess : failed(LOST);
}
EMU_EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  EMU_NEEDS(stream_of(stream)->device);
  count(Counter::stream_query);
  return stream_of(stream)->done() ? cudaSuccess : cudaErrorNotReady;
}
EMU_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  Stream* stream = stream_of(handle);
  EMU_NEEDS(stream->device);
  count(Counter::stream_wait_event);
  int device = reinterpret_cast<Event*>(event)->device;
  auto marker = reinterpret_cast<Event*>(event)->recorded();
  if (!marker) return cudaSuccess;
  auto pass = [=] { stream->spend(marker->at_ms(), 0); };
  if (marker->reached())
    stream->when_there(pass);
  else
    stream->enqueue([=] {
      if (marker->wait(device)) pass();
    });
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = stream_of(stream)->flags;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = stream_of(stream)->id;
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  EMU_NEEDS(stream_of(stream)->device);
  stream_of(stream)->enqueue([=] {
    Spend program(PROGRAM);
    function(argument);
  });
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument,
                                             unsigned) {
  EMU_NEEDS(stream_of(stream)->device);
  stream_of(stream)->enqueue([=] {
    Spend program(PROGRAM);
    function(stream, cudaSuccess, argument);
  });
  return cudaSuccess;
}

EMU_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  EMU_NEEDS(current_device());
  auto* event = new Event;
  event->flags = flags;
  event->device = current_device();
  *made = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
EMU_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  EMU_NEEDS(stream_of(stream_handle)->device);
  count(Counter::event_record);
  auto* event = reinterpret_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  if (stream->device != event->device) return failed(cudaErrorInvalidResourceHandle);
  auto marker = std::make_shared<Marker>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->marker = marker;
  }
  stream->mark(marker);
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EMU_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  EMU_NEEDS(reinterpret_cast<Event*>(event)->device);
  count(Counter::event_query);
  auto marker = reinterpret_cast<Event*>(event)->recorded();
  return !marker || marker->passed() ? cudaSuccess : cudaErrorNotReady;
}
EMU_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  EMU_NEEDS(reinterpret_cast<Event*>(event)->device);
  count(Counter::event_sync);
  int device = reinterpret_cast<Event*>(event)->device;
  auto marker = reinterpret_cast<Event*>(event)->recorded();
  if (!marker || (marker->wait(device) && sleep_until(marker->at_ms(), device))) return cudaSuccess;
  return failed(LOST);
}
// CUDA 12.8's headers rename this to cudaEventElapsedTime_v2.
EMU_EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  EMU_NEEDS(reinterpret_cast<Event*>(from)->device);
  auto *first = reinterpret_cast<Event*>(from), *second = reinterpret_cast<Event*>(to);
  auto begin = first->recorded(), end = second->recorded();
  if (!begin || !end || ((first->flags | second->flags) & cudaEventDisableTiming))
    return failed(cudaErrorInvalidResourceHandle);
  if (!begin->passed() || !end->passed()) return cudaErrorNotReady;
  *ms = static_cast<float>(end->at_ms() - begin->at_ms());
  return cudaSuccess;
}
