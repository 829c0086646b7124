"""Clean runs of TRL for `false_alarms`: trainings of the shipped miniatures with no fault planted, and what their rules watch.

    python -m benchmarks.clean_runs train "bf16" 0 runs/clean    # a few minutes each; --steps 200
    python -m benchmarks.clean_runs record runs/clean            # adds them to benchmarks/clean_runs.json

`record` keeps of each step the metrics that alarms watch, the gap of the probes and the bad rows. It also keeps which weight
updates were called bad, and whether beyond doubt. A run that was broken off counts up to its last step. A run that is recorded
already is replaced by one of the same setting and seed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import measured_on
from mismatch_ext.alarms import rules_of
from mismatch_ext.bad_rows import METRIC
from mismatch_ext.config import MonitorConfig
from mismatch_ext.events import WEIGHT_SYNC
from mismatch_ext.log import WEIGHT_SYNC_GAP
from mismatch_ext.log_reading import read_run
from mismatch_ext.names import PREFIX, TRL

RECORDED = Path(__file__).with_name("clean_runs.json")
STEPS, ROWS = 200, 32
LEAST = 48
"""Fewer steps of a run are not kept: a choice, two blocks that are drawn."""
LOG_ODDS = "log_odds_abs_diff_mean"
UPDATE = "update"
"""Name under which a step has the verdict on its weight update."""
GOOD, DOUBTFUL, CLEARLY_BAD = 0.0, 1.0, 2.0
# A doubtful update must not end a run whose doubts are counted.
GOES_ON = {"monitor": {"weight_sync": "warn"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"mismatch": {}},
    "float32": {"mismatch": {}, "bf16": False, "model_init_kwargs": {"dtype": "float32"}},
    "FP16": {"mismatch": {"precision": {"dtype": "float16", "init_scale": 4096.0}, **GOES_ON}},
    "bf16, mixture": {"model": "moe", "mismatch": {}},
    "bf16, mixture, R3": {"model": "moe", "mismatch": {"routing": {"mode": "R3"}, **GOES_ON}},
    "bf16, LoRA": {"mismatch": {}, "lora": True, "learning_rate": 1e-3},
}
"""Arguments of the trainer, and `model` and `lora`, which are this file's."""


def train(setting: str, seed: int, out: Path, steps: int) -> None:
    """Train once."""
    import examples.script as shared  # first, because it sets what vLLM reads when it is imported

    # isort: split
    import yaml
    from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
    from peft import LoraConfig

    from examples.arithmetic.shipped import shipped_model
    from examples.arithmetic.task import reward

    given = dict(SETTINGS[setting])
    model, adapts = given.pop("model", "dense"), given.pop("lora", False)
    arguments = yaml.safe_load(shared.SMALL.read_text(encoding="utf-8"))
    for of_script in ("model_name_or_path", "eval_prompts"):
        del arguments[of_script]
    arguments |= {
        "use_cpu": True,
        "vllm_gpu_memory_utilization": 0.05,
        "per_device_train_batch_size": ROWS,
        "max_steps": steps,
        "seed": seed,
        "disable_tqdm": True,
        "output_dir": str(out),
    }
    trainer: Any = MismatchGRPOTrainer(
        model=str(shipped_model(model)),
        reward_funcs=reward,
        args=MismatchGRPOConfig(**arguments | given),
        train_dataset=shared.problems(steps * ROWS // arguments["num_generations"], seed=1000 + seed),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]) if adapts else None,
    )
    trainer.train()
    shared.end_engine(trainer)


def watched(metric: str) -> bool:
    """Tell whether a rule of `false_alarms` looks at a metric; growth is computed there, from the gaps."""
    names = {name for rule in rules_of(MonitorConfig(), TRL).values() for name in rule.logged}
    names |= {WEIGHT_SYNC_GAP, PREFIX + LOG_ODDS}
    return metric in names or metric.startswith(PREFIX + METRIC)


def columns(folder: Path) -> dict[str, Any]:
    """Return what is kept of a run: for each metric its values by step, four digits each, and the steps of bad updates."""
    run = read_run(folder)
    steps = [step.metrics for step in run.steps if step.split == "train" and PREFIX + "k3_kl" in step.metrics]
    names = sorted({name for metrics in steps for name in metrics if watched(name) and "growth" not in name})
    metrics = {name: [_short(step.get(name)) for step in steps] for name in names} or {"loss": []}
    # An update comes before its step, and a good one leaves no event.
    bad = {event.step + 1: event.level == "error" for event in run.events if event.name == WEIGHT_SYNC}
    return {"metrics": metrics, "bad_updates": bad}


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def recorded() -> Iterator[tuple[str, list[list[dict[str, float]]]]]:
    """Yield each setting, and for each of its runs what was kept of every step, with the verdict on its update as `UPDATE`."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
    for setting, seeds in found.items():
        yield setting, [_steps(kept) for kept in seeds.values()]


def _steps(kept: Mapping[str, Any]) -> list[dict[str, float]]:
    series: dict[str, list[float | None]] = kept["metrics"]
    bad: dict[str, bool] = kept["bad_updates"]
    steps = []
    for index in range(len(next(iter(series.values())))):
        values = {name: column[index] for name, column in series.items()}
        step = {name: value for name, value in values.items() if value is not None}
        clear = bad.get(str(index + 1))
        step[UPDATE] = GOOD
        if clear is not None:
            step[UPDATE] = CLEARLY_BAD if clear else DOUBTFUL
        steps.append(step)
    return steps


def main() -> None:
    """Train or record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clean_runs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("setting", choices=SETTINGS)
    training.add_argument("seed", type=int)
    training.add_argument("folder", type=Path)
    training.add_argument("--steps", type=int, default=STEPS)
    commands.add_parser("record").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "train":
        train(given.setting, given.seed, given.folder / given.setting / str(given.seed), given.steps)
        return
    known: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
    runs: dict[str, dict[str, Any]] = {}
    for setting in SETTINGS:
        of_seeds = known.get(setting, {})
        for folder in sorted((given.folder / setting).glob("*/mismatch")):
            kept = columns(folder)
            if all(len(values) >= LEAST for values in kept["metrics"].values()):
                of_seeds[folder.parent.name] = {"measured": measured_on(), **kept}
        if of_seeds:
            runs[setting] = of_seeds
    text = json.dumps({"rows": ROWS, "runs": runs}, separators=(",", ":"))
    RECORDED.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
