"""The real DeepSpeed, ZeRO-2 and ZeRO-3, on one process and on two over gloo: which sections run, and what is refused.

DeepSpeed is in a directory of its own, which `make setup` fills: wherever TRL and transformers find it, they import it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.peers.scenarios import ROOT, Ran, Scenario, named

scenarios = named("tests.peers.trl.scenarios_deepspeed")

pytestmark = pytest.mark.engine
DEEPSPEED = Path(sys.prefix) / "deepspeed"
BUILT = Path(sys.prefix) / "torch_extensions"
"""What DeepSpeed compiles, once for each environment; tests/conftest.py removes the locks of builds that were killed."""


def launch(scenario: Scenario, processes: int, limit: int = 600, **payload: Any) -> None:
    """Run a scenario on some processes.

    The first of an environment compiles, and who comes beside it waits for that, within the limit in seconds.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"),
        *("-m", scenario.module, scenario.name, json.dumps({"limit": limit, **payload}, default=str)),
    ]
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(DEEPSPEED),
        "TORCH_EXTENSIONS_DIR": str(BUILT),
        # DeepSpeed compiles what ranks on one machine talk by, and asks for ninja by its name.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stdout, stderr = process.communicate(timeout=limit + 60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher passes it on to its ranks
        stdout, stderr = process.communicate(timeout=60)
    Ran(process.returncode, None, stdout, stderr).expect()


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_every_section_runs_on_one_process(stage: int, dense: Path, tmp_path: Path) -> None:
    launch(scenarios.dense, 1, model=dense, out=tmp_path, stage=stage)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_skipped_steps_lost_updates_and_a_scale_of_ours(stage: int, dense: Path, tmp_path: Path) -> None:
    launch(scenarios.faulty, 1, model=dense, out=tmp_path, stage=stage)


@pytest.mark.nightly
def test_two_processes_replay_routes_and_verify_every_update(moe: Path, tmp_path: Path) -> None:
    launch(scenarios.experts, 2, model=moe, out=tmp_path)
