"""The examples' own figures, on as many tokens as it takes to judge them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.sequences import MEASURES, judged_replay, read_sequences, times_larger
from mismatch_ext.log_reading import read_run
from tests.commands import shell
from tests.evidence import judges
from tests.peers.test_examples import BATCH, IN_EVIDENCE, ROOT, example, python

SPLITS = ("eval/familiar", "eval/unfamiliar")
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)]


def test_dense_fp16(tmp_path: Path) -> None:
    """`examples/dense_fp16.py`: in float16 the gap of TRL's own dtypes is about 8 times smaller, and k3 about 64 times."""
    shell(f"python examples/dense_fp16.py --eval_prompts 2048 --output_dir {tmp_path}")
    half, stock = read_sequences(tmp_path), read_sequences(tmp_path / "stock")
    for split in SPLITS:
        for run in (half, stock):
            judges.enough_tokens(sum(run[split]["tokens"]))
        found = {name: times_larger(stock, half, split, name).to_dict() for name in MEASURES}
        judges.fp16_is_finer(found["abs"], found["k3"])


def test_moe_r3(tmp_path: Path) -> None:
    """`examples/moe_r3.py`: less of k3 is left with replay, on the same tokens."""
    shell(f"python examples/moe_r3.py --eval_prompts 2048 --output_dir {tmp_path}")
    sums = read_sequences(tmp_path)
    for split in SPLITS:
        judges.enough_tokens(sum(sums[split]["tokens"]))
    judges.replay_lowers_k3({split: judged_replay(sums, split) for split in SPLITS})


def test_kl_ablation(tmp_path: Path) -> None:
    """`examples/kl_ablation.py` trains with each of its settings, and prints a row for each."""
    rows = example("kl_ablation", tmp_path, *BATCH, "--max_steps", "2")
    assert [row[0] for row in rows] == ["TRL k3 loss", "k1 reward", "k3 both"]
    blocks = [read_run(tmp_path / name.replace(" ", "-") / "mismatch").header["config"] for name, *_ in rows]
    assert "kl" not in blocks[0]
    assert [(b["kl"]["estimator"], b["kl"]["placement"]) for b in blocks[1:]] == [("k1", "reward"), ("k3", "both")]


def test_lr_control(tmp_path: Path) -> None:
    """`examples/lr_control.py` finds a surge of lengths at the second step, and halves the rate four steps later."""
    block = json.dumps({"lr": {"baseline_window": 2}})
    steps = ("--max_steps", "6", "--warmup_steps", "0", "--grow_at", "2", "--lr_scheduler_type", "constant")
    rows = example("lr_control", tmp_path, *BATCH, *steps, "--learning_rate", "1e-5", "--mismatch", block)
    # A surge at step 2: halved every round(1.8 * 2) = 4 steps.
    assert [row[2] for row in rows] == ["1", "1", "1", "1", "0.5", "0.5"]
    assert [row[1] for row in rows] == ["1.00e-05"] * 4 + ["5.00e-06"] * 2
    lengths = [float(row[3]) for row in rows]
    assert max(lengths[:2]) <= 12 < min(lengths[2:])


@pytest.mark.parametrize("name", IN_EVIDENCE)
def test_runs_as_a_script_from_anywhere(name: str, tmp_path: Path) -> None:
    assert f"usage: {name}.py" in python(ROOT / f"examples/{name}.py", "--help", cwd=tmp_path)
