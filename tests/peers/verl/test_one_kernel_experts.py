"""A vLLM whose experts choose without their router, as 0.24 does on a CPU and under monolithic kernels of a GPU.

What it records with the router told of the choice is looked at in `test_main_ppo.py`.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.peers.verl.cpu.one_kernel_experts import UNTOLD
from tests.peers.verl.main_ppo import lasting, run_verl


def one_kernel() -> bool:
    """Tell whether the installed vLLM is of that kind, without importing it."""
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations if spec else None) or []
    return any((Path(folder) / "model_executor/layers/fused_moe/cpu_fused_moe.py").is_file() for folder in folders)


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.engine,
    pytest.mark.skipif(
        not one_kernel(), reason="this vLLM's experts ask their router; `make stack STACK=verl-pins` runs it"
    ),
]


def test_its_own_zeros_end_the_run_before_a_step_is_trained(moe: Path, tmp_path: Path) -> None:
    block = ("+mismatch.precision.dtype=float32", "+mismatch.routing.mode=R3")
    run = run_verl(tmp_path, [*block, *lasting(1)], model=moe, plugin=True, env={UNTOLD: "1"})
    run.expect_failure()
    assert re.search(r"RoutingError: .*all expert ids are zero, so the engine did not capture", run.log), run.log[
        -6000:
    ]
