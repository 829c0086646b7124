"""Runs a command of README and docs as a reader does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.rendezvous import rendezvous

ROOT = Path(__file__).resolve().parents[1]
# The README first: what stands there and in a page is taken from there.
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def fenced(language: str) -> list[str]:
    """Return the blocks of a language of README and docs, in the order of `PAGES`."""
    return [block for text in PAGES.values() for block in re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)]


def _commands() -> list[str]:
    """Return the lines of bash blocks, one that is continued as one, and `make` commands of running text where those are told."""
    lines = [line for block in fenced("bash") for line in block.replace("\\\n", " ").splitlines()]
    told = (PAGES[ROOT / name] for name in ("README.md", "docs/development.md"))
    said = [
        found for text in told for found in re.findall(r"`(make [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    ]
    return list(dict.fromkeys(" ".join(line.split()) for line in [*lines, *said] if line))


COMMANDS = _commands()
# Those that make a trainer of TRL's or give one its arguments; other blocks are of a loop, and leave out what is the reader's.
PYTHON = [block for block in fenced("python") if block.startswith("args = ") or "trainer.train()" in block]


def shell(command: str, timeout: float = 3400, **env: str) -> str:
    """Run a command in the checkout with its environment first on the path, and return what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        env={**os.environ, **rendezvous(), "PATH": path, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def in_readme(beginning: str) -> str:
    """Return the command of README or docs that begins so."""
    return next(command for command in COMMANDS if command.startswith(beginning))


SETUP = """
import os
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
from datasets import Dataset
from examples.arithmetic.task import make_dataset, reward
dataset = Dataset.from_list(make_dataset(8))
short = dict(max_steps=1, per_device_train_batch_size=8, max_completion_length=16, use_cpu=True, report_to="none",
             vllm_max_model_length=64, vllm_gpu_memory_utilization=0.05, gradient_checkpointing=False)
"""


def script(block: int, model: str, output_dir: str) -> str:
    """Return one of the Python blocks as a script that trains one short step.

    A page's model, output folder and a real run's length and device are what a reader replaces too. A block without a trainer
    of its own gives other arguments to the first one's.
    """
    code = PYTHON[block]
    if block and "trainer.train()" in code:
        code = code.replace("logging_steps=1)", "logging_steps=1, **short)")
    elif block:
        code = re.sub(r"^args = .*\n", lambda _: PYTHON[block], PYTHON[0], flags=re.M)
    assert block == 0 or code != PYTHON[0]
    code = code.replace("Qwen/Qwen3-0.6B", model).replace('"run"', repr(output_dir))
    code = code.replace("use_vllm=True,", "use_vllm=True, **short,")
    return f"{SETUP}{code}\nprint('trained', trainer.state.global_step)\nos._exit(0)\n"


def run_block(block: int, models: dict[str, Path], folder: Path) -> None:
    """Run one of the Python blocks with a tiny model of the kind that it needs, and hold that it has trained."""
    model = models["moe" if '"routing"' in PYTHON[block] else "dense"]
    path = folder / f"block{block}.py"
    path.write_text(script(block, str(model), str(folder / f"run{block}")), encoding="utf-8")
    assert "trained 1" in shell(f"python {path}", PYTHONPATH=str(ROOT))
