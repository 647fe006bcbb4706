"""A row survives the file, and fits the gather."""

from __future__ import annotations

import json
import pickle

from hypothesis import given
from hypothesis import strategies as st

from shardkit.memory.ledger import MOST_CHARACTERS, ROW_BYTES
from shardkit.memory.rows import (
    KINDS,
    PHASES,
    DeviceMemory,
    HostMemory,
    Identity,
    PhaseMemory,
    RankRow,
    StateBytes,
    gather_json,
)
from tests.memory.samples import gpu_row

n_bytes = st.integers(0, 2**50)
maybe = st.none() | n_bytes
seconds = st.none() | st.integers(0, 10**10).map(lambda us: us / 1e6)
ROWS = st.builds(
    RankRow,
    identity=st.builds(Identity, st.integers(0, 4095), st.text(min_size=1), st.integers(0, 7), st.text()),
    step_time_s=seconds,
    data_wait_s=seconds,
    busy_s=seconds,
    host_mem=st.builds(HostMemory, n_bytes, n_bytes, maybe, maybe, n_bytes, n_bytes, maybe),
    device_mem=st.none() | st.builds(DeviceMemory, *[n_bytes] * 5, maybe, maybe, st.none() | st.text()),
    state=st.none() | st.fixed_dictionaries({kind: st.builds(StateBytes, n_bytes, n_bytes) for kind in KINDS}),
    phases=st.dictionaries(st.sampled_from(PHASES), st.builds(PhaseMemory, *[maybe] * 4, n_bytes, n_bytes)),
    alloc_retries=maybe,
    ooms=maybe,
    overhead_s=st.integers(0, 10**9).map(lambda us: us / 1e6),
)


def test_the_largest_row_fits_its_message() -> None:
    n_bytes = 2**62
    row = RankRow(
        Identity(2**20, "h" * 255, 2**10, "d" * 255), 0.1, 0.1, 0.1, HostMemory(*[n_bytes] * 7),
        DeviceMemory(*[n_bytes] * 7, "ä" * MOST_CHARACTERS), {kind: StateBytes(n_bytes, n_bytes) for kind in KINDS},
        {phase: PhaseMemory(*[n_bytes] * 6) for phase in PHASES}, n_bytes, n_bytes, 0.1,
    )  # fmt: skip
    assert len(pickle.dumps((2**40, row))) < ROW_BYTES


@given(ROWS)
def test_json_form_loses_nothing(row: RankRow) -> None:
    assert RankRow.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_fields_of_a_later_version_are_passed_over() -> None:
    obj = gpu_row(0).to_json()
    obj["new"] = 1
    obj["host_mem"]["pinned"] = 2
    del obj["host_mem"]["staging"]  # this one was added after the first version
    assert RankRow.from_json(obj) == gpu_row(0)


def test_a_device_says_in_how_many_steps_it_is_full_and_a_gather_its_millisecond() -> None:
    assert DeviceMemory(1, 1, 1, 1, 100, 40, 7).full_in == 8
    assert gather_json(1, 1.23456, [])["time"] == 1.235
