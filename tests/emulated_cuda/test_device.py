"""What the device looks like follows the environment."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated_cuda import call, needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation]


def describe() -> dict[str, Any]:
    shown = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    torch.cuda.init()
    return {
        "available": torch.cuda.is_available(),
        "names": [each.name for each in shown],
        "memory": [each.total_memory for each in shown],
        "free": [torch.cuda.mem_get_info(i)[0] for i in range(len(shown))],
        "capability": [list(torch.cuda.get_device_capability(i)) for i in range(len(shown))],
        "uuids": [str(each.uuid) for each in shown],
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False) if shown else None,
    }


def test_devices_memory_name_and_capability() -> None:
    found = call(
        describe, EMUCUDA_DEVICES="3", EMUCUDA_MEMORY="80G", EMUCUDA_CONTEXT="500M", EMUCUDA_NAME="NVIDIA A100",
        EMUCUDA_SM="8.0",
    )  # fmt: skip
    assert found["names"] == ["NVIDIA A100"] * 3
    assert found["memory"] == [80 << 30] * 3
    assert found["free"] == [(80 << 30) - (500 << 20)] * 3
    assert found["capability"] == [[8, 0]] * 3
    assert len(set(found["uuids"])) == 3
    assert found["bf16"] is True


def test_an_old_card_has_no_bf16() -> None:
    found = call(describe, EMUCUDA_DEVICES="1", EMUCUDA_SM="7.5")
    assert found["capability"] == [[7, 5]] and found["bf16"] is False


def test_visible_devices_are_chosen_as_the_driver_does() -> None:
    every = call(describe, EMUCUDA_DEVICES="4")["uuids"]
    found = call(describe, EMUCUDA_DEVICES="4", CUDA_VISIBLE_DEVICES="2,0,9,1")["uuids"]
    assert found == [every[2], every[0]], "a number without a device ends the list"


def available() -> list[Any]:
    return [torch.cuda.is_available(), torch.cuda.device_count()]


def test_there_may_be_no_device() -> None:
    assert call(available, EMUCUDA_DEVICES="4", CUDA_VISIBLE_DEVICES="") == [False, 0]


def test_without_the_variable_nothing_is_emulated() -> None:
    assert call(available, EMUCUDA="0", CUDA_VISIBLE_DEVICES="") == [False, 0]


def lose(file: str) -> None:
    """What each kind of call says of the second device once it is lost, and what the first one does then."""
    with torch.cuda.device(1):
        x, host = torch.ones(4, device="cuda"), torch.ones(4).pin_memory()
        event, stream = torch.cuda.Event(), torch.cuda.Stream()
        kept: list[torch.Tensor] = []  # the next allocation is a new one
        calls: dict[str, Callable[[], Any]] = {
            "operator": lambda: x + 1,
            "copy": lambda: x.copy_(host, non_blocking=True),
            "item": lambda: x[0].item(),
            "allocation": lambda: kept.append(torch.empty(100 << 20, device="cuda:1")),
            "synchronize": torch.cuda.synchronize,
            "stream": stream.synchronize,
            "event": event.record,
            "free": lambda: torch.cuda.mem_get_info(1),
        }
        for call_it in calls.values():
            call_it()
        handle, nvml = ctypes.c_void_p(), ctypes.CDLL("libnvidia-ml.so.1")
        assert nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(handle)) == 0
        Path(file).touch()
        found = {name: said(call_it) for name, call_it in calls.items()}
    found["nvml"] = str(nvml.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(ctypes.c_uint())))
    found["other"] = str((torch.ones(4, device="cuda:0") + 1).sum().item())
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch aborts where pinned memory that was copied to a lost device is freed


def said(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"


def test_a_device_that_falls_off_the_bus(tmp_path: Path) -> None:
    file = tmp_path / "gone"
    found = call(lose, str(file), EMUCUDA_DEVICES="2", EMUCUDA_LOST=f"1:{file}")
    assert found.pop("other") == "8.0"
    assert found.pop("nvml") == "15", "NVML_ERROR_GPU_IS_LOST"
    assert set(found.values()) == {"AcceleratorError: CUDA error: unknown error"}, found
