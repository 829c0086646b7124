"""The main job, settings side by side: stock bf16, uniform FP16, float32 as the oracle; routing replay where there are experts.

    python examples/demo.py --model both --run-dir runs/demo

Each setting runs in a process of its own: TRL's trainer, vLLM as the rollout engine in the same process, the same checkpoint and
prompts. All hold the same weights when the gap is measured, on prompts of the trained distribution and on unfamiliar, longer
ones. `--full` takes four times as many prompts, trains the dense model by GRPO, and measures every setting of the mixture of
experts; `--full --model moe` trains that.

`--model real` is the same job on SmolLM2-135M-Instruct, and on a mixture of experts that is made from it (`examples/smollm2.py`).
Its prompts are chats: questions with one right answer, and open requests (`examples/chat.py`).

Every figure printed comes from the runs of this call; ratios come with the interval that the bootstrap over responses gives them.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from examples import smollm2
from examples.arithmetic.shipped import shipped_model
from examples.bootstrap import Interval
from examples.script import pooled
from examples.sequences import FILE, MEASURES, Sums, left_by_replay, read_sequences, times_larger
from mismatch_ext import read_run

CONFIG = "examples/configs/arithmetic.yaml"
CONFIGS = {"dense": CONFIG, "moe": CONFIG, "real": "examples/configs/smollm2.yaml"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One column of the comparison.

    Args:
        name: Folder and row name.
        title: One line about it for the reader.
        block: The `mismatch:` block.
        steps: GRPO steps; fewer for float16, whose matrix products a CPU computes about eight times slower.
        mixture: Whether the real model's mixture of experts is run, and not the real model itself.
    """

    name: str
    title: str
    block: dict[str, Any]
    steps: int
    mixture: bool = False


# These runs are too short to search for a loss scale, so the first one does not overflow the small model's gradients.
FP16 = {"precision": {"dtype": "float16", "init_scale": 4096.0}}
R3 = {"routing": {"mode": "R3", "measured": 1.0}}
BF16 = Setting(name="bf16", title="TRL's own dtypes: bf16 autocast, engine dtype auto", block={}, steps=24)
FP32 = {"precision": {"dtype": "float32"}}
REAL_STEPS = 4
SETTINGS = {
    "dense": (
        BF16,
        Setting(name="fp16", title="uniform FP16", block=FP16, steps=12),
        Setting(name="fp32", title="float32, the oracle", block=FP32, steps=24),
    ),
    "moe": (
        BF16,
        Setting(name="bf16-r3", title="bf16 with routing replay", block=R3, steps=24),
        Setting(name="fp16-r3", title="uniform FP16 with routing replay", block={**FP16, **R3}, steps=6),
        Setting(name="fp32-r3", title="float32 with routing replay, the oracle", block={**FP32, **R3}, steps=24),
    ),
    "real": (
        replace(BF16, steps=REAL_STEPS),
        Setting(name="fp16", title="uniform FP16", block=FP16, steps=REAL_STEPS),
        Setting(name="fp32", title="float32, the oracle", block=FP32, steps=REAL_STEPS),
        Setting(name="moe-bf16", title="experts, bf16 with routing replay", block=R3, steps=REAL_STEPS, mixture=True),
        Setting(
            name="moe-fp16",
            title="experts, uniform FP16 with routing replay",
            block={**FP16, **R3},
            steps=REAL_STEPS,
            mixture=True,
        ),
    ),
}
# Runs whose gaps are compared, the coarser dtype first.
COMPARED = {
    "dense": (("bf16", "fp16"), ("bf16", "fp32")),
    "moe": (("bf16", "fp16-r3"), ("bf16-r3", "fp16-r3"), ("bf16-r3", "fp32-r3")),
    "real": (("bf16", "fp16"), ("bf16", "fp32"), ("moe-bf16", "moe-fp16")),
}
TITLES = {"dense": "dense model", "moe": "mixture of experts", "real": "SmolLM2-135M-Instruct"}
COLUMNS = {
    "mean|Δlogp|": "logp_abs_diff_mean",
    "max|Δlogp|": "logp_abs_diff_max",
    "k1": "kl",
    "k3": "k3_kl",
    "seq KL k3": "seq_k3_kl",
    "F(1.1)": "f_1.1",
    "F(2)": "f_2",
}
ADDITION = (
    ("eval/familiar", "trained distribution, same weights"),
    ("eval/unfamiliar", "unfamiliar and longer, same weights"),
)
OPEN = "eval/open"
CHAT = (("eval/questions", "questions with one answer, same weights"), (OPEN, "open requests, same weights"))
EVALUATED = {"dense": ADDITION, "moe": ADDITION, "real": CHAT}
SPLITS = (*ADDITION, *CHAT, ("train", "during training"))
SHORT = {
    "dense": ("bf16", "fp16", "fp32"),
    "moe": ("bf16-r3",),
    "real": ("bf16", "fp16", "fp32", "moe-bf16", "moe-fp16"),
}
"""Settings without `--full`; replay alone measures the same tokens without replay as well."""
SMALL_MODELS_PROMPTS = {False: 512, True: 2048}
PROMPTS = {"dense": SMALL_MODELS_PROMPTS, "moe": SMALL_MODELS_PROMPTS, "real": {False: 16, True: 64}}
"""Prompts of each evaluation set, without `--full` and with it."""
# Keys: what is compared, split, measure.
Intervals = dict[str, dict[str, dict[str, Interval]]]


def train(
    setting: Setting, model: Path, run_dir: Path, steps: int, prompts: int, *more: str, config: str = CONFIG
) -> float:
    """Run one setting in a process of its own, with more arguments of TRL's where given; return its wall-clock seconds."""
    out = run_dir / setting.name
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable, "-m", "examples.trl_grpo", "--config", config,
        "--model_name_or_path", str(model), "--output_dir", str(out), "--run_name", setting.name,
        "--max_steps", str(steps), "--eval_prompts", str(prompts),
        "--mismatch", json.dumps({**setting.block, "monitor": {"run_dir": str(out)}}),
        *more,
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def table_of(title: str, headings: Iterable[str]) -> Table:
    """Return an empty table whose first two columns are the run and the set of prompts."""
    table = Table(title=title)
    for at, heading in enumerate(("run", "on", *headings)):
        table.add_column(heading, justify="left" if at < 2 else "right", no_wrap=True)
    return table


def print_table(rows: list[dict[str, Any]], tokens: dict[str, dict[str, float]], title: str, console: Console) -> None:
    """Print the rows for a person, evaluation sets first, with the number of tokens behind each."""
    headings = ("tokens", *COLUMNS, "reward")
    table = table_of(f"Gap between rollout engine (vLLM) and trainer (TRL), in nats: {title}", headings)
    for split, label in SPLITS:
        of_split = [row for row in rows if row["split"] == split]
        for row in of_split:
            reward = f"{row['reward_last']:.2f}"
            if split == OPEN:
                reward = "-"  # no answer is right or wrong
            if split == "train":
                reward = f"{row['reward_first']:.2f} → {row['reward_last']:.2f} in {row['logs']} steps"
            figures = [f"{row['values'][key]:.1e}" for key in COLUMNS.values()]
            counted = f"{tokens[row['run']][split]:,.0f}"
            table.add_row(row["run"], label, counted, *figures, reward, end_section=row is of_split[-1])
    console.print(table)


def compare(kind: str, sums: dict[str, Sums]) -> Intervals:
    """Return the ratios that the demo is about, each with its interval over responses, by what `examples.sequences` kept."""
    ratios = {
        f"{coarse} over {fine}": functools.partial(times_larger, sums[coarse], sums[fine])
        for coarse, fine in COMPARED[kind]
        if coarse in sums and fine in sums
    }
    splits = [split for split, _ in EVALUATED[kind]]
    replayed = {run: kept for run, kept in sums.items() if "native/k3" in kept[splits[0]]}
    ratios |= {f"{run} left by replay": functools.partial(left_by_replay, kept) for run, kept in replayed.items()}
    return {
        name: {split: {measure: ratio(split, measure) for measure in MEASURES} for split in splits}
        for name, ratio in ratios.items()
    }


def print_intervals(intervals: Intervals, console: Console) -> None:
    """Print each ratio with its interval."""
    title = "Ratios of means over the same prompts, with 95 % intervals (bootstrap over responses)"
    table = table_of(title, MEASURES.values())
    for name, splits in intervals.items():
        shown = [(split, label) for split, label in SPLITS if split in splits]
        for split, label in shown:
            figures = [format(splits[split][measure], ".3g") for measure in MEASURES]
            table.add_row(name, label, *figures, end_section=split == shown[-1][0])
    console.print(table)


def replay_rows(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what replay changed on the same tokens: the gap under the trainer's own routes, and under vLLM's."""
    rows = []
    for name, data in runs.items():
        for split, label in SPLITS:
            names = ("logp_abs_diff_mean", "logp_abs_diff_max", "k3_kl")
            pairs = {key: (pooled(data, f"native/{key}", split), pooled(data, key, split)) for key in names}
            if pairs["k3_kl"][0] is not None:
                flips = pooled(data, "routing/set_mismatch_frac", split)
                rows.append({"run": name, "split": split, "label": label, "flips": flips, **pairs})
    return rows


def print_replay(rows: list[dict[str, Any]], console: Console) -> None:
    """Print what replay changed on the same tokens."""
    if not rows:
        return
    title = "The same tokens, routed by the trainer itself -> replayed"
    table = table_of(title, ("mean|Δlogp|", "max|Δlogp|", "k3", "flips"))
    for row in rows:
        figures = [
            f"{row[key][0]:.1e} → {row[key][1]:.1e}" for key in ("logp_abs_diff_mean", "logp_abs_diff_max", "k3_kl")
        ]
        table.add_row(row["run"], row["label"], *figures, f"{row['flips']:.2%}")
    console.print(table)


def measured_tokens(data: Any) -> dict[str, float]:
    """Return the number of tokens behind each split's figures."""
    tokens: dict[str, float] = {}
    for record in data.steps:
        tokens[record.split] = tokens.get(record.split, 0.0) + (record.metrics.get("mismatch/tokens") or 0.0)
    return tokens


def checkpoint_of(kind: str, setting: Setting) -> Path:
    """Return the folder of the model that a setting runs, which is made first if it is a real one."""
    if kind != "real":
        return shipped_model(kind)
    return smollm2.upcycle() if setting.mixture else smollm2.unpack()


def experts_of(models: Iterable[Path]) -> dict[str, float]:
    """Return what the making of a mixture of experts cost; empty where no model has been made here."""
    for model in models:
        file = model / smollm2.COST
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    return {}


def demonstrate(kind: str, run_dir: Path, args: argparse.Namespace, trains: bool, console: Console) -> None:
    """Run the settings of a model, print the tables, write summary and report."""
    chosen = settings(kind, args.full, args.settings)
    models = {setting.name: checkpoint_of(kind, setting) for setting in chosen}
    for model in dict.fromkeys(models.values()):
        console.print(f"{TITLES[kind]}: {model}", soft_wrap=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    seconds, runs = dict[str, float](), dict[str, Any]()
    prompts = args.prompts or PROMPTS[kind][args.full]
    for number, setting in enumerate(chosen, 1):
        console.rule(f"[{number}/{len(chosen)}] {TITLES[kind]}, {setting.name}: {setting.title}")
        steps = (setting.steps if args.steps is None else args.steps) if trains else 0
        if args.resume and has_ended(run_dir / setting.name):
            console.print("measured by an earlier call")
            runs[setting.name] = read_run(run_dir / setting.name)
            continue
        seconds[setting.name] = train(setting, models[setting.name], run_dir, steps, prompts, config=CONFIGS[kind])
        runs[setting.name] = read_run(run_dir / setting.name)
    command = [sys.executable, "-m", "mismatch_ext", "report", str(run_dir), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout)
    # The folder may hold runs of an earlier call.
    rows, replay = [row for row in report["rows"] if row["run"] in runs], replay_rows(runs)
    intervals = compare(kind, {setting.name: read_sequences(run_dir / setting.name) for setting in chosen})
    tokens = {name: measured_tokens(data) for name, data in runs.items()}
    header = runs[chosen[0].name].header
    document = {
        "model": kind,
        "checkpoints": {name: str(model) for name, model in models.items()},
        "measured_on": header["run"]["device"],
        "versions": header["versions"],
        "seconds": seconds,
        "replay": replay,
        "intervals": {
            name: {split: {key: asdict(interval) for key, interval in by.items()} for split, by in splits.items()}
            for name, splits in intervals.items()
        },
        "tokens": tokens,
        "experts": experts_of(models.values()),
        "rows": rows,
    }
    (run_dir / "summary.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    print_table(rows, tokens, TITLES[kind], console)
    print_replay(replay, console)
    print_intervals(intervals, console)
    console.print(f"training and measuring took {sum(seconds.values()):.0f} s on {header['run']['device']}")
    console.print(report["verdict"])
    console.print(f"report: {report['report']}", soft_wrap=True)


def has_ended(run: Path) -> bool:
    """Tell whether a setting was measured to its end."""
    return (run / FILE).is_file()


def settings(kind: str, full: bool, names: Sequence[str] | None = None) -> list[Setting]:
    """Return the settings of a model that are run: those of some names, or by whether all are asked for."""
    if names is not None:
        return [setting for setting in SETTINGS[kind] if setting.name in names]
    return [setting for setting in SETTINGS[kind] if full or setting.name in SHORT[kind]]


def main() -> None:
    """Run the settings of one model, or those of the dense one and the same measurements with experts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("dense", "moe", "both", "real"), default="both")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=None, help="GRPO steps of every setting (default: each its own)")
    parser.add_argument("--full", action="store_true", help="train as well, with more prompts and settings")
    parser.add_argument("--prompts", type=int, help="prompts per evaluation set (default: by model, more with --full)")
    names = dict.fromkeys(setting.name for of in SETTINGS.values() for setting in of)
    parser.add_argument("--settings", nargs="+", choices=names, help="settings to run (default: by model and --full)")
    parser.add_argument("--resume", action="store_true", help="leave out settings that an earlier call has measured")
    args = parser.parse_args()
    kinds = ("dense", "moe") if args.model == "both" else (args.model,)
    console = Console(width=180)
    for kind in kinds:
        beside = len(kinds) > 1 and kind == "moe"
        run_dir = args.run_dir / "moe" if beside else args.run_dir
        demonstrate(kind, run_dir, args, args.full and not beside, console)
    if not args.full and args.model != "real":
        console.print("make demo FULL=1 trains too, with four times as many prompts: 14 minutes.")


if __name__ == "__main__":
    main()
