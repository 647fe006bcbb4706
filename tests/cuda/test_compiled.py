"""torch.compile on CUDA: steps, evaluations and resumed runs, with Triton and CUDA graphs but no computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda import gpu_ranks
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), needs_emulation]

CARD = {
    "EMUCUDA": "1", "EMUCUDA_COMPUTE": "0", "EMUCUDA_DEVICES": "4", "EMUCUDA_MEMORY": "80G", "EMUCUDA_SM": "9.0",
    "EMUCUDA_SKIP_ABOVE": "64K",
    # Autotuning's choice among products says nothing here, and compiling the candidates takes hours.
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("compiled")
    # Inductor's and Triton's caches are shared: dynamo, whose graphs are counted, has none.
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CARD.items():
            patch.setenv(name, value)
        env = {"TMPDIR": str(folder), **caches}
        (results,) = gpu_ranks(1, "tests.cuda.compiled:run", timeout=660, env=env, backend="nccl")
    return dict(results)


def spans(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [span for span in result["spans"] if span["span"].startswith(kind)]


@pytest.mark.parametrize("case", ["plain", "CUDA graphs", "a whole engine"])
def test_nothing_is_compiled_twice_without_need(case: str, found: dict[str, Any]) -> None:
    result = found[case]
    assert result["breaks"] == {}
    assert [span["graphs"] for span in spans(result, "first")] == [1], "equal blocks share it"
    assert [span["graphs"] for span in spans(result, "step")] == [0] * 5
    assert [span["graphs"] for span in spans(result, "ragged")] == [1], "for batches of any size from now on"
    # The validation data end with a smaller batch.
    assert [span["graphs"] for span in spans(result, "evaluation")] == [2, 0, 0, 2], "once in each process and size"
    assert [span["graphs"] for span in spans(result, "resumed")] == [1, 0]


def test_cuda_graphs_run_steps_and_evaluations(found: dict[str, Any]) -> None:
    result = found["CUDA graphs"]
    steps = spans(result, "step")
    assert steps[-1]["graph_launches"] == 2 * 2 * 2, "micro-batches, forward and backward, blocks"
    assert steps[-1]["launches"] < spans(found["plain"], "step")[-1]["launches"]
    assert not any("overwritten" in line or "fast path" in line for line in result["said"])
