// CUPTI, as torch.profiler's kineto uses it: each emulated kernel, copy and collective becomes an activity record,
// with a launch record that links it to the operator on the CPU.
#include <cupti.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "core.h"
#include "settings.h"

// The newest layouts that CUDA 12 and 13 both declare; kineto reads a prefix of them.
using KernelRecord = CUpti_ActivityKernel9;
using CopyRecord = CUpti_ActivityMemcpy5;
using Bytes = std::vector<uint8_t>;

static const int CALLBACK_LAUNCH = 211, CALLBACK_COPY = 41;  // cudaLaunchKernel, cudaMemcpyAsync

static std::mutex mutex;
static std::set<int> enabled;
static std::vector<Bytes> records;
static std::unordered_set<std::string> kernel_names;  // records point into it
static std::atomic<uint32_t> next_correlation{1};
static thread_local std::vector<std::pair<int, uint64_t>> external_ids;  // (kind, id) of the operators being run

static CUpti_BuffersCallbackRequestFunc request_buffer;
static CUpti_BuffersCallbackCompleteFunc complete_buffer;
static CUpti_TimestampCallbackFunc timestamp;
static uint8_t* buffer;  // kineto wants its first one when the first record arrives
static size_t buffer_size;

static uint64_t now() {
  if (timestamp) return timestamp();
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return time.tv_sec * 1'000'000'000ull + time.tv_nsec;
}

template <class Record>
static void add(const Record& record) {
  size_t most = 0;
  if (!buffer && request_buffer) request_buffer(&buffer, &buffer_size, &most);
  Bytes bytes((sizeof record + 7) / 8 * 8);
  std::memcpy(bytes.data(), &record, sizeof record);
  records.push_back(std::move(bytes));
}

static uint32_t launched(ActivityKind kind, uint64_t begin, uint64_t end) {
  uint32_t correlation = next_correlation++;
  std::lock_guard<std::mutex> lock(mutex);
  if (enabled.count(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION)) {
    std::set<int> seen;  // the innermost of each kind
    for (auto id = external_ids.rbegin(); id != external_ids.rend(); ++id) {
      if (!seen.insert(id->first).second) continue;
      CUpti_ActivityExternalCorrelation link;
      std::memset(&link, 0, sizeof link);
      link.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
      link.externalKind = static_cast<CUpti_ExternalCorrelationKind>(id->first);
      link.externalId = id->second;
      link.correlationId = correlation;
      add(link);
    }
  }
  if (enabled.count(CUPTI_ACTIVITY_KIND_RUNTIME)) {
    CUpti_ActivityAPI call;
    std::memset(&call, 0, sizeof call);
    call.kind = CUPTI_ACTIVITY_KIND_RUNTIME;
    call.cbid = kind == ACTIVITY_KERNEL ? CALLBACK_LAUNCH : CALLBACK_COPY;
    call.start = begin;
    call.end = end;
    call.processId = static_cast<uint32_t>(getpid());
    call.threadId = static_cast<uint32_t>(syscall(SYS_gettid));
    call.correlationId = correlation;
    add(call);
  }
  return correlation;
}

static void finished(const Activity* activity) {
  std::lock_guard<std::mutex> lock(mutex);
  if (activity->kind == ACTIVITY_KERNEL) {
    if (!enabled.count(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL)) return;
    KernelRecord kernel;
    std::memset(&kernel, 0, sizeof kernel);
    kernel.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    kernel.start = activity->begin;
    kernel.end = activity->end;
    kernel.deviceId = static_cast<uint32_t>(activity->device);
    kernel.contextId = kernel.deviceId + 1;
    kernel.streamId = activity->stream;
    kernel.gridX = kernel.gridY = kernel.gridZ = kernel.blockY = kernel.blockZ = 1;
    kernel.blockX = 128;
    kernel.registersPerThread = 32;
    kernel.correlationId = activity->correlation;
    kernel.name = kernel_names.insert(activity->name).first->c_str();
    add(kernel);
    return;
  }
  if (!enabled.count(CUPTI_ACTIVITY_KIND_MEMCPY)) return;
  bool to_device = activity->kind == ACTIVITY_COPY_TO_DEVICE;
  CopyRecord copy;
  std::memset(&copy, 0, sizeof copy);
  copy.kind = CUPTI_ACTIVITY_KIND_MEMCPY;
  copy.copyKind = to_device ? CUPTI_ACTIVITY_MEMCPY_KIND_HTOD : CUPTI_ACTIVITY_MEMCPY_KIND_DTOH;
  copy.srcKind = to_device ? CUPTI_ACTIVITY_MEMORY_KIND_PINNED : CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  copy.dstKind = to_device ? CUPTI_ACTIVITY_MEMORY_KIND_DEVICE : CUPTI_ACTIVITY_MEMORY_KIND_PINNED;
  copy.flags = CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC;
  copy.bytes = activity->bytes;
  copy.start = activity->begin;
  copy.end = activity->end;
  copy.deviceId = static_cast<uint32_t>(activity->device);
  copy.contextId = copy.deviceId + 1;
  copy.streamId = activity->stream;
  copy.correlationId = activity->correlation;
  add(copy);
}

static const Profiler PROFILER = {now, launched, finished};

EMU_EXPORT CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiGetResultString(CUptiResult result, const char** text) {
  *text = result ? "CUPTI_ERROR" : "CUPTI_SUCCESS";
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiGetTimestamp(uint64_t* time) {
  *time = now();
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  *subscriber = reinterpret_cast<CUpti_SubscriberHandle>(1);
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }
EMU_EXPORT CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) {
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiEnableDomain(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain) {
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain, uint32_t id, const char** name) {
  *name = id == CALLBACK_LAUNCH ? "cudaLaunchKernel_v7000" : id == CALLBACK_COPY ? "cudaMemcpyAsync_v3020" : "cudaApi";
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  std::lock_guard<std::mutex> lock(mutex);
  enabled.insert(kind);
  emucuda_attach_profiler(&PROFILER);
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  std::lock_guard<std::mutex> lock(mutex);
  enabled.erase(kind);
  if (enabled.empty()) emucuda_attach_profiler(nullptr);
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiFinalize(void) {
  emucuda_attach_profiler(nullptr);
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }
EMU_EXPORT CUptiResult cuptiActivityGetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }
EMU_EXPORT CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
EMU_EXPORT CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
EMU_EXPORT CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
EMU_EXPORT CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc function) {
  timestamp = function;
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                                      CUpti_BuffersCallbackCompleteFunc complete) {
  request_buffer = request;
  complete_buffer = complete;
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  external_ids.emplace_back(kind, id);
  return CUPTI_SUCCESS;
}
EMU_EXPORT CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* last) {
  for (size_t i = external_ids.size(); i-- > 0;) {
    if (external_ids[i].first != kind) continue;
    if (last) *last = external_ids[i].second;
    external_ids.erase(external_ids.begin() + static_cast<std::ptrdiff_t>(i));
    return CUPTI_SUCCESS;
  }
  return CUPTI_ERROR_QUEUE_EMPTY;
}
EMU_EXPORT CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* number) {
  *number = 0;
  return CUPTI_SUCCESS;
}

// Hands what was recorded over, in the caller's buffers.
EMU_EXPORT CUptiResult cuptiActivityFlushAll(uint32_t) {
  std::vector<Bytes> ready;
  uint8_t* into;
  size_t size;
  {
    std::lock_guard<std::mutex> lock(mutex);
    ready.swap(records);
    into = buffer;
    size = buffer_size;
    buffer = nullptr;
  }
  size_t next = 0;
  while (next < ready.size() && request_buffer && complete_buffer) {
    size_t most = 0, used = 0;
    if (!into) request_buffer(&into, &size, &most);
    if (!into) return CUPTI_ERROR_OUT_OF_MEMORY;
    for (; next < ready.size() && used + ready[next].size() <= size; next++) {
      std::memcpy(into + used, ready[next].data(), ready[next].size());
      used += ready[next].size();
    }
    complete_buffer(nullptr, 0, into, size, used);
    if (!used) return CUPTI_ERROR_OUT_OF_MEMORY;
    into = nullptr;
  }
  return CUPTI_SUCCESS;
}

static size_t size_of(const CUpti_Activity* record) {
  size_t size;
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: size = sizeof(CUpti_ActivityExternalCorrelation); break;
    case CUPTI_ACTIVITY_KIND_RUNTIME: size = sizeof(CUpti_ActivityAPI); break;
    case CUPTI_ACTIVITY_KIND_MEMCPY: size = sizeof(CopyRecord); break;
    default: size = sizeof(KernelRecord);
  }
  return (size + 7) / 8 * 8;
}
EMU_EXPORT CUptiResult cuptiActivityGetNextRecord(uint8_t* from, size_t used, CUpti_Activity** record) {
  uint8_t* next = *record ? reinterpret_cast<uint8_t*>(*record) + size_of(*record) : from;
  if (next >= from + used) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}
