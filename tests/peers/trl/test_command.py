"""`mismatch-ext trl grpo --config file.yaml`: TRL's own script, with a block in the file that `trl grpo` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from examples.arithmetic.task import make_dataset
from mismatch_ext.log_reading import read_run
from tests.commands import shell

pytestmark = pytest.mark.engine


def test_a_file_of_trl_grpo_with_a_block_trains(dense: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rows = "\n".join(json.dumps(row) for row in make_dataset(8))
    (data / "train.jsonl").write_text(rows)
    settings = {
        "model_name_or_path": str(dense),
        "dataset_name": str(data),
        "reward_funcs": ["examples.arithmetic.task.reward"],
        "output_dir": str(tmp_path / "run"),
        "use_vllm": True,
        "use_cpu": True,
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "max_completion_length": 16,
        "vllm_max_model_length": 64,
        "vllm_gpu_memory_utilization": 0.05,
        "report_to": "none",
        "save_strategy": "no",
        "mismatch": {"precision": {"dtype": "float32"}},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    shell(f"mismatch-ext trl grpo --config {file} --logging_steps 1", VLLM_CPU_KVCACHE_SPACE="1")
    run = read_run(tmp_path / "run" / "mismatch")
    assert run.header["config"]["precision"]["dtype"] == "float32"
    assert run.ending.status == "completed" and 0 < run.series("mismatch/logp_abs_diff_mean")[1][0] < 1e-5  # type: ignore[operator]
