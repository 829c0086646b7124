"""What one GPU shows of the gap: precisions, experts, truncated sampling, faults, clipping, costs, and 100 steps of training.

    python -m benchmarks.gpu --out runs/gpu

Needs torch and transformers alone: the engine is transformers' own decode with a KV cache, the models are random. Each part is
written as it is done; a second start goes on where the first one ended. About 30 minutes on one GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.gpu import experts, faults, ladder, overhead, phantom, sampling, training
from benchmarks.gpu.models import SIZES
from benchmarks.gpu.page import page
from benchmarks.gpu.part import Part, Setting
from benchmarks.gpu.record import record_of, today
from benchmarks.gpu.svg import svg

PARTS: tuple[Part, ...] = (ladder, experts, sampling, faults, phantom, overhead, training)
SETTING = "setting.json"


def options() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="as torch has it (default: %(default)s)")
    parser.add_argument(
        "--size", choices=SIZES, help="of the random models (default: 1b; small on a CPU, tiny with --quick)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the same code with little of everything; its figures say nothing"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--seeds", type=int, default=3, help="repetitions of what learns (default: %(default)s; 1 with --quick)"
    )
    parser.add_argument("--model", default="", help="folder of a checkpoint, in the place of random weights")
    parser.add_argument("--prompts", default="", help="file of prompts for --model, as `mismatch-ext doctor` takes it")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="", help="samples too, where it is installed")
    parser.add_argument(
        "--parts", nargs="+", choices=[part.NAME for part in PARTS], help="those to measure (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="results (default: %(default)s)")
    parser.add_argument(
        "--evidence", type=Path, help="folder for the record (default: evidence/ for a whole run on a GPU, else none)"
    )
    return parser


def setting_of(given: argparse.Namespace) -> Setting:
    """Return what the options decide.

    Raises:
        SystemExit: There is no such device.
    """
    cuda = torch.device(given.device).type == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit(f"--device {given.device}: torch {torch.__version__} sees no GPU; give --device cpu --quick.")
    size = given.size or ("tiny" if given.quick else "1b" if cuda else "small")
    return Setting(
        device=given.device,
        size=size,
        quick=given.quick,
        seed=given.seed,
        seeds=1 if given.quick else given.seeds,
        model=given.model,
        prompts=given.prompts,
        engine=given.engine,
    )


def ensure_same(folder: Path, setting: Setting) -> None:
    """Write the setting into a new folder, or hold it against that of the results there.

    Raises:
        SystemExit: They are of another setting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTING
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
        other = {key: known.get(key) for key, value in setting.data().items() if known.get(key) != value}
        if other:
            raise SystemExit(f"--out: {folder} holds results with {other}; give another folder, or remove it.")
    else:
        path.write_text(json.dumps(setting.data(), indent=1) + "\n", encoding="utf-8")


def measure(part: Part, setting: Setting, folder: Path, bar: Any) -> None:
    """Run one part and write its result, whole or not at all."""
    start = time.time()
    found = part.run(setting, folder, lambda what: bar.set_postfix_str(f"{part.NAME}: {what}"))
    result = {"seconds": round(time.time() - start, 1), "date": today(), "found": found}
    path = folder / f"{part.NAME}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
    for name, figure in part.figures(found).items():
        (folder / f"{part.NAME}_{name}.svg").write_text(svg(figure), encoding="utf-8")
    if torch.device(setting.device).type == "cuda":
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing, draw it, and write the record; 1 where a part failed."""
    given = options().parse_args(argv)
    setting = setting_of(given)
    ensure_same(given.out, setting)
    # A float32 side that multiplies in TensorFloat32 is no oracle.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    chosen = [part for part in PARTS if given.parts is None or part.NAME in given.parts]
    failed = []
    with tqdm(chosen, unit="part", file=sys.stderr) as bar:
        for part in bar:
            bar.set_description(part.TITLE)
            if (given.out / f"{part.NAME}.json").is_file():
                continue
            try:
                measure(part, setting, given.out, bar)
            except Exception as error:  # noqa: BLE001 - memory, or a kernel that is not there: the other parts stand without it
                failed.append(part.NAME)
                bar.write(f"{part.NAME} failed: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
    done = {
        part.NAME: json.loads(path.read_text(encoding="utf-8"))
        for part in PARTS
        if (path := given.out / f"{part.NAME}.json").is_file()
    }
    typed = shlex.join(["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)])
    record = record_of(setting, typed, done)
    targets = [given.out / "record.json"]
    if given.evidence is not None:
        targets.append(given.evidence / f"{record['name']}.json")
    elif torch.device(setting.device).type == "cuda" and not setting.quick and len(done) == len(PARTS):
        targets.append(Path("evidence") / f"{record['name']}.json")
    for path in targets:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        print(path)
    drawn = {
        part.NAME: [f"{part.NAME}_{name}.svg" for name in part.figures(done[part.NAME]["found"])]
        for part in PARTS
        if part.NAME in done
    }
    (given.out / "page.md").write_text(page(record, {part.NAME: part.TITLE for part in PARTS}, drawn), encoding="utf-8")
    print(given.out / "page.md")
    for name in failed:
        print(f"{name} is missing: it failed; the same command tries it again", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
