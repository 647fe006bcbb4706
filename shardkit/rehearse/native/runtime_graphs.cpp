// Runtime API: CUDA graphs, in no-compute mode alone. A stream that captures queues nothing: what is launched on it is
// counted, and a replay keeps the stream busy for as long. Only one stream captures at a time in a graph.
#include <cuda_runtime_api.h>

#include <memory>
#include <unordered_map>

#include "counters.h"
#include "errors.h"
#include "lost.h"
#include "settings.h"
#include "streams.h"

using namespace emu;

namespace {
struct Graph {
  unsigned long long id;
  size_t nodes = 0;
  double ms = 0;
};
std::mutex captures_mutex;
std::unordered_map<const Stream*, Graph*>& captures() {
  static auto* found = new std::unordered_map<const Stream*, Graph*>;
  return *found;
}
Graph* capture_of(const Stream* stream) {
  auto found = captures().find(stream);
  return found == captures().end() ? nullptr : found->second;
}
}  // namespace

namespace emu {
bool capturing(const Stream* stream) {
  std::lock_guard<std::mutex> lock(captures_mutex);
  return capture_of(stream) != nullptr;
}
bool captured(const Stream* stream, double ms) {
  if (settings().compute) return false;
  std::lock_guard<std::mutex> lock(captures_mutex);
  Graph* graph = capture_of(stream);
  if (!graph) return false;
  graph->nodes++;
  graph->ms += ms;
  return true;
}
}  // namespace emu

EMU_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = capturing(stream_of(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
static cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                cudaGraph_t* graph, const cudaGraphNode_t** nodes, size_t* n_nodes) {
  std::lock_guard<std::mutex> lock(captures_mutex);
  Graph* found = capture_of(stream_of(stream));
  *status = found ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = found ? found->id : 0;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(found);
  if (nodes) *nodes = nullptr;
  if (n_nodes) *n_nodes = 0;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
EMU_EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                unsigned long long* id, cudaGraph_t* graph,
                                                const cudaGraphNode_t** nodes, const cudaGraphEdgeData**,
                                                size_t* n_nodes) {
  return capture_info(stream, status, id, graph, nodes, n_nodes);
}
#else
#undef cudaStreamGetCaptureInfo
#undef cudaStreamGetCaptureInfo_v2
#undef cudaStreamGetCaptureInfo_v3
EMU_EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                   unsigned long long* id, cudaGraph_t* graph,
                                                   const cudaGraphNode_t** nodes, size_t* n_nodes) {
  return capture_info(stream, status, id, graph, nodes, n_nodes);
}
EMU_EXPORT cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                   unsigned long long* id, cudaGraph_t* graph,
                                                   const cudaGraphNode_t** nodes, const cudaGraphEdgeData**,
                                                   size_t* n_nodes) {
  return capture_info(stream, status, id, graph, nodes, n_nodes);
}
#endif
EMU_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

EMU_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (settings().compute) return failed(cudaErrorNotSupported);
  static unsigned long long last = 0;
  std::lock_guard<std::mutex> lock(captures_mutex);
  if (!captures().emplace(stream_of(stream), nullptr).second) return failed(cudaErrorIllegalState);
  captures()[stream_of(stream)] = new Graph{++last};
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard<std::mutex> lock(captures_mutex);
  Graph* found = capture_of(stream_of(stream));
  if (!found) return failed(cudaErrorIllegalState);
  captures().erase(stream_of(stream));
  *graph = reinterpret_cast<cudaGraph_t>(found);
  return cudaSuccess;
}

EMU_EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = reinterpret_cast<Graph*>(graph)->nodes;
  return cudaSuccess;
}
static cudaError_t instantiate(cudaGraphExec_t* made, cudaGraph_t graph) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  return instantiate(made, graph);
}
EMU_EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  return instantiate(made, graph);
}
EMU_EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  EMU_NEEDS(stream->device);
  count(Counter::graph_launch);
  launched(stream, reinterpret_cast<Graph*>(graph)->ms);
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
EMU_EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
