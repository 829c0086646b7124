"""Two ranks: forks that have imported the peers, or processes under `accelerate launch`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.peers.scenarios import ROOT, Ran, Run, Scenario, named

scenarios = named("tests.peers.trl.scenarios_ranks")

# accelerate runs a single process for `--cpu`; `--multi_gpu` is its name for torchrun, and the script says what it runs on.
KINDS = {
    "ddp": ["--multi_gpu"],
    "fsdp2": [
        *("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        # TRL shards its reference model as rank 1 has loaded it, which with accelerate's default is not at all.
        *("--fsdp_state_dict_type", "FULL_STATE_DICT", "--fsdp_cpu_ram_efficient_loading", "false"),
    ],
}
ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


def launch(
    run: Run,
    kind: str,
    scenario: Scenario,
    out: Path,
    limit: int = 300,
    env: dict[str, str] | None = None,
    **payload: Any,
) -> Ran:
    """Run a scenario on two ranks, in a way of `KINDS` or as DDP in "forks"; variables are read when the peers are imported."""
    given = {"out": str(out), "limit": limit, **payload}
    if kind == "forks":
        forked = {"module": scenario.module, "name": scenario.name, **given}
        return run(scenarios.on_two, timeout=limit + 60, env=env, fresh=bool(env), **forked)
    command = [
        *ACCELERATE,
        *KINDS[kind],
        "--module",
        scenario.module,
        scenario.name,
        json.dumps(given, default=str),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        # Ranks give up by themselves at `limit`, and say where they stood.
        stdout, stderr = process.communicate(timeout=limit + 60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher passes it on to its ranks
        stdout, stderr = process.communicate(timeout=60)
    return Ran(process.returncode, None, stdout, stderr)
