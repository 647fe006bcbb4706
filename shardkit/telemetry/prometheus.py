"""Serve rank 0's latest figures to Prometheus over HTTP, from a thread of `prometheus_client`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ..errors import ConfigError
from ..memory.rows import RankRow
from .catalog import METRICS

Family = Any
"""A metric of prometheus_client, with its samples: the library is an extra, imported where it is used."""
Sample = tuple[Sequence[str], float | None]
_RANK = ("rank", "host")
_HOST = {"rss": "resident now", "peak_rss": "resident, peak so far", "uss": "freed if the process ended",
         "children_rss": "resident in data-loader workers", "limit": "the process may use"}  # fmt: skip
_DEVICE = {"allocated": "held by tensors now", "peak_allocated": "held by tensors, peak so far",
           "reserved": "held by the allocator now", "peak_reserved": "held by the allocator, peak so far",
           "total": "on the device"}  # fmt: skip


class MetricsServer:
    """Answers `GET /metrics` at `url` with the figures of the last `update`.

    Args:
        port: TCP port; 0 = any free one.

    Raises:
        ConfigError: prometheus_client is not installed, the port is taken, or the host is not an address of this
            machine.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ConfigError(
                f"logging.prometheus_port={port} needs prometheus_client, which does not import: {error}",
                "pip install 'shardkit[prometheus]', or remove logging.prometheus_port",
            ) from error
        self._latest: tuple[Mapping[str, float], Sequence[RankRow]] = ({}, ())
        registry: Any = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"logging.prometheus_port={port}: cannot listen on {host}:{port}: {reason}",
                "set logging.prometheus_port=0 for any free port, or logging.prometheus_host to one of this node's",
            ) from error
        self._thread.name = "prometheus"
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def update(self, record: Mapping[str, float], rows: Sequence[RankRow]) -> None:
        """Answer with this step's record and these rows from now on; cheap, since text is rendered on request."""
        self._latest = ({**self._latest[0], **record}, rows)

    def collect(self) -> Iterator[Family]:
        """The latest figures, as prometheus_client's registry asks for them at each scrape."""
        record, rows = self._latest
        for metric in METRICS:
            if metric.prometheus and metric.key in record:
                yield _family(metric.prometheus, metric.meaning, (), [((), record[metric.key])], metric.kind)
        for families in (_times, _memory, _state, _phases):
            for family in families(rows):
                if family.samples:
                    yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _times(rows: Sequence[RankRow]) -> Iterator[Family]:
    yield _per_rank("rank_step_seconds", "Mean step of a rank.", rows, lambda row: row.step_time_s)
    waiting = "Part of a rank's mean step that waits for data."
    yield _per_rank("rank_data_wait_seconds", waiting, rows, lambda row: row.data_wait_s)


def _memory(rows: Sequence[RankRow]) -> Iterator[Family]:
    for key, text in _HOST.items():
        name = f"rank_host_{key}_bytes"
        yield _per_rank(name, f"Host memory {text}.", rows, lambda row, key=key: getattr(row.host_mem, key))  # type: ignore[misc]
    for key, text in _DEVICE.items():
        name = f"rank_device_{key}_bytes"
        yield _per_rank(name, f"Device memory {text}.", rows, lambda row, key=key: getattr(row.device_mem, key, None))  # type: ignore[misc]
    retries = "Times the allocator freed its cache."
    yield _per_rank("rank_alloc_retries_total", retries, rows, lambda row: row.alloc_retries, "counter")


def _state(rows: Sequence[RankRow]) -> Iterator[Family]:
    samples = [
        ((*_labels(row), kind, location), float(getattr(n_bytes, location)))
        for row in rows
        for kind, n_bytes in (row.state or {}).items()
        for location in ("device", "host")
    ]
    labels = (*_RANK, "category", "place")
    yield _family("rank_state_bytes", "Bytes of state by category and place.", labels, samples)


def _phases(rows: Sequence[RankRow]) -> Iterator[Family]:
    samples = [
        ((*_labels(row), phase, kind), peak)
        for row in rows
        for phase, memory in row.phases.items()
        for kind, peak in (("allocated", memory.peak_allocated), ("rss", memory.peak_rss))
    ]
    yield _family("rank_phase_peak_bytes", "Largest peak in each phase.", (*_RANK, "phase", "kind"), samples)


def _per_rank(
    name: str,
    text: str,
    rows: Sequence[RankRow],
    figure: Callable[[RankRow], float | None],
    kind: Literal["gauge", "counter"] = "gauge",
) -> Family:
    return _family(name, text, _RANK, [(_labels(row), figure(row)) for row in rows], kind)


def _labels(row: RankRow) -> tuple[str, str]:
    return str(row.identity.rank), row.identity.host


def _family(
    name: str, text: str, labels: Sequence[str], samples: Sequence[Sample], kind: Literal["gauge", "counter"] = "gauge"
) -> Family:
    """One metric with a sample for each set of label values; samples without a figure are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family: Family = make(f"shardkit_{name}", text.replace("`", ""), labels=labels)
    for label_values, figure in samples:
        if figure is not None:
            family.add_metric(label_values, figure)
    return family
