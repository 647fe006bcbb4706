"""Serve rank 0's latest figures to Prometheus (text format 0.0.4) over HTTP, from a thread."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..errors import ConfigError
from ..memory.rows import RankRow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_RECORD = {
    "step": ("gauge", "step", "Last completed optimizer step."),
    "loss": ("gauge", "loss", "Mean loss over the step's targets, all ranks."),
    "val_loss": ("gauge", "validation_loss", "Mean loss of the last evaluation."),
    "grad_norm": ("gauge", "grad_norm", "Global gradient norm before clipping."),
    "lr": ("gauge", "learning_rate", "Learning rate of the step."),
    "step_time_s": ("gauge", "step_seconds", "Wall time of the step on rank 0."),
    "forward_s": ("gauge", "forward_seconds", "Part of the step in forward, rank 0."),
    "backward_s": ("gauge", "backward_seconds", "Part of the step in backward, rank 0."),
    "update_s": ("gauge", "update_seconds", "Part of the step in clipping and the update, rank 0."),
    "tokens_per_s": ("gauge", "tokens_per_second", "Target tokens per second, all ranks."),
    "tokens_total": ("counter", "tokens_total", "Target tokens so far, all ranks."),
}
_HOST = {"rss": "resident now", "peak_rss": "resident, peak so far", "uss": "freed if the process ended",
         "children_rss": "resident in data-loader workers", "limit": "the process may use"}  # fmt: skip
_DEVICE = {"allocated": "held by tensors now", "peak_allocated": "held by tensors, peak so far",
           "reserved": "held by the allocator now", "peak_reserved": "held by the allocator, peak so far",
           "total": "on the device"}  # fmt: skip

Labels = Mapping[str, object]
Sample = tuple[Labels, float | None]


class MetricsServer:
    """Answers `GET /metrics` at `url` with the figures of the last `update`.

    Args:
        port: TCP port; 0 = any free one.

    Raises:
        ConfigError: the port is taken, or the host is not an address of this machine.
    """

    def __init__(self, host: str, port: int) -> None:
        self._latest: tuple[Mapping[str, float], Sequence[RankRow]] = ({}, ())
        try:
            self._server = _Server(host, port, self)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"logging.prometheus_port={port}: cannot listen on {host}:{port}: {reason}",
                "set logging.prometheus_port=0 for any free port, or logging.prometheus_host to one of this node's",
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def update(self, record: Mapping[str, float], rows: Sequence[RankRow]) -> None:
        """Answer with this step's record and these rows from now on; cheap, since text is rendered on request."""
        self._latest = ({**self._latest[0], **record}, rows)

    def render(self) -> str:
        """The current figures as Prometheus text."""
        return "".join(f"{line}\n" for line in _lines(*self._latest))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, source: MetricsServer) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.source = source
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's version looks up this host's full name, which can take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.source.render().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log scrapes."""


def _lines(record: Mapping[str, float], rows: Sequence[RankRow]) -> Iterator[str]:
    for key, (kind, name, text) in _RECORD.items():
        if key in record:
            yield from _family(name, kind, text, [({}, record[key])])
    ranks = [({"rank": row.identity.rank, "host": row.identity.host}, row) for row in rows]
    yield from _family("rank_step_seconds", "gauge", "Mean step of a rank.", [(who, r.step_time_s) for who, r in ranks])
    waits = [(who, row.data_wait_s) for who, row in ranks]
    yield from _family("rank_data_wait_seconds", "gauge", "Part of a rank's mean step that waits for data.", waits)
    for key, text in _HOST.items():
        held = [(who, getattr(row.host_mem, key)) for who, row in ranks]
        yield from _family(f"rank_host_{key}_bytes", "gauge", f"Host memory {text}.", held)
    for key, text in _DEVICE.items():
        held = [(who, getattr(row.device_mem, key)) for who, row in ranks if row.device_mem is not None]
        yield from _family(f"rank_device_{key}_bytes", "gauge", f"Device memory {text}.", held)
    yield from _family("rank_state_bytes", "gauge", "Bytes of state by category and place.", list(_state(ranks)))
    yield from _family("rank_phase_peak_bytes", "gauge", "Largest peak in each phase.", list(_phases(ranks)))
    retries = [(who, row.alloc_retries) for who, row in ranks]
    yield from _family("rank_alloc_retries_total", "counter", "Times the allocator freed its cache.", retries)


def _state(ranks: Sequence[tuple[Labels, RankRow]]) -> Iterator[Sample]:
    for who, row in ranks:
        for kind, held in (row.state or {}).items():
            yield {**who, "category": kind, "place": "device"}, held.device
            yield {**who, "category": kind, "place": "host"}, held.host


def _phases(ranks: Sequence[tuple[Labels, RankRow]]) -> Iterator[Sample]:
    for who, row in ranks:
        for phase, memory in row.phases.items():
            yield {**who, "phase": phase, "kind": "allocated"}, memory.peak_allocated
            yield {**who, "phase": phase, "kind": "rss"}, memory.peak_rss


def _family(name: str, kind: str, text: str, samples: Sequence[Sample]) -> Iterator[str]:
    """HELP, TYPE and one line per sample; nothing if no sample has a value."""
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return
    yield f"# HELP shardkit_{name} {text}"
    yield f"# TYPE shardkit_{name} {kind}"
    for labels, value in known:
        pairs = ",".join(f'{key}="{_escaped(str(found))}"' for key, found in labels.items())
        yield f"shardkit_{name}{'{' + pairs + '}' if pairs else ''} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
