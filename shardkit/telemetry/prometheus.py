"""Serve rank 0's latest figures to Prometheus over HTTP, from a thread of `prometheus_client`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

from ..errors import ConfigError, importing
from ..memory.rows import RankRow
from .catalog import METRICS

Family = Any
"""A metric of prometheus_client, with its samples: the library is an extra, imported where it is used."""
Sample = tuple[Sequence[str], float | None]
Kind = Literal["gauge", "counter"]
_RANK = ("rank", "host")
_HOST = {"rss": "resident now", "peak_rss": "resident, peak so far", "uss": "freed if the process ended",
         "children_rss": "resident in data-loader workers", "limit": "the process may use"}  # fmt: skip
_DEVICE = {"allocated": "held by tensors now", "peak_allocated": "held by tensors, peak so far",
           "reserved": "held by the allocator now", "peak_reserved": "held by the allocator, peak so far",
           "total": "on the device"}  # fmt: skip


class MetricsServer:
    """Answers `GET /metrics` at `url` with the figures of the last `update`.

    `port`: TCP port; 0 = any free one.
    """

    def __init__(self, host: str, port: int) -> None:
        fix = "pip install 'shardkit[prometheus]', or remove logging.prometheus_port"
        with importing(f"logging.prometheus_port={port} needs prometheus_client", fix):
            from prometheus_client import CollectorRegistry, start_http_server
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
        for family in _families_of_ranks(rows):
            if family.samples:
                yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _families_of_ranks(rows: Sequence[RankRow]) -> Iterator[Family]:
    def per_rank(name: str, text: str, figure: Callable[[RankRow], float | None], kind: Kind = "gauge") -> Family:
        return _family(f"rank_{name}", text, _RANK, [(_labels(row), figure(row)) for row in rows], kind)

    yield per_rank("step_seconds", "Mean step of a rank.", attrgetter("step_time_s"))
    yield per_rank("data_wait_seconds", "Part of a rank's mean step that waits for data.", attrgetter("data_wait_s"))
    for key, text in _HOST.items():
        yield per_rank(f"host_{key}_bytes", f"Host memory {text}.", attrgetter(f"host_mem.{key}"))
    on_device = [row for row in rows if row.device_mem is not None]
    for key, text in _DEVICE.items():
        samples = [(_labels(row), getattr(row.device_mem, key)) for row in on_device]
        yield _family(f"rank_device_{key}_bytes", f"Device memory {text}.", _RANK, samples)
    retries = "Times the allocator freed its cache."
    yield per_rank("alloc_retries_total", retries, attrgetter("alloc_retries"), "counter")
    state = [
        ((*_labels(row), kind, location), float(getattr(n_bytes, location)))
        for row in rows
        for kind, n_bytes in (row.state or {}).items()
        for location in ("device", "host")
    ]
    text = "Bytes of state by category and place."
    yield _family("rank_state_bytes", text, (*_RANK, "category", "place"), state)
    peaks = [
        ((*_labels(row), phase, kind), peak)
        for row in rows
        for phase, memory in row.phases.items()
        for kind, peak in (("allocated", memory.peak_allocated), ("rss", memory.peak_rss))
    ]
    yield _family("rank_phase_peak_bytes", "Largest peak in each phase.", (*_RANK, "phase", "kind"), peaks)


def _labels(row: RankRow) -> tuple[str, str]:
    return str(row.identity.rank), row.identity.host


def _family(name: str, text: str, labels: Sequence[str], samples: Sequence[Sample], kind: Kind = "gauge") -> Family:
    """One metric with a sample for each set of label values; samples without a figure are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family: Family = make(f"shardkit_{name}", text.replace("`", ""), labels=labels)
    for label_values, figure in samples:
        if figure is not None:
            family.add_metric(label_values, figure)
    return family
