"""The Python blocks of README and docs, as a reader pastes them, after the lines that a reader has already or must fill in."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.commands import ROOT, shell

ALONE = {
    "README.md": (0, 1),
    "docs/trl.md": (0,),
    "docs/loop.md": (0,),
    "docs/kl.md": (0,),
    "docs/lr.md": (0,),
    "docs/correction.md": (0,),
    "docs/doctor.md": (0,),
}
"""Blocks that have a test of their own: `test_readme.py`, `trl/test_attach.py`, `test_loop_page.py`, and of unit tests
`test_primitives.py` and `test_rollouts.py`."""
TRL = """
import os
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
import functools, trl
from datasets import Dataset
from examples.arithmetic.task import make_dataset, reward
dataset = Dataset.from_list(make_dataset(8))
short = dict(max_steps=1, per_device_train_batch_size=8, max_completion_length=16, use_cpu=True, report_to="none",
             vllm_max_model_length=64, vllm_gpu_memory_utilization=0.05, gradient_checkpointing=False, save_strategy="no")
"""
CONFIG = "from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer\n"
TOOLS = """
from pathlib import Path
from tests.peers.trl.scenarios_turns import Counter, add, asked, even as reward, speaking_model
speaking, dataset = str(speaking_model(Path("MOE").parent / "speaking")), asked()
short |= dict(max_tool_calling_iterations=2, generation_kwargs={"max_tokens": 5}, max_completion_length=26, temperature=0.8,
              vllm_max_model_length=96, bf16=False)
"""
TRAINED = "\ntrainer.train()\nassert trainer.state.global_step == 1\nos._exit(0)\n"
SHORT = ("use_vllm=True,", "use_vllm=True, **short,")
MODEL = ('"Qwen/Qwen3-30B-A3B"', '"MOE"')
# Page and number of the block: what stands before it, what of it is filled in, what follows.
TRAINING: dict[tuple[str, int], tuple[str, tuple[tuple[str, str], ...], str]] = {
    ("docs/trl.md", 1): (TRL, (MODEL, SHORT), TRAINED),
    ("docs/trl.md", 3): (
        TRL + CONFIG + TOOLS,
        (
            ("...,", "model=speaking, reward_funcs=reward, train_dataset=dataset,"),
            ("top_k=64", "top_k=8"),  # of a vocabulary of 60
            ("tools=[add]", "tools=[add], environment_factory=Counter"),  # whatever this model says calls both
            SHORT,
        ),
        TRAINED,
    ),
    ("docs/trl.md", 5): (
        TRL + CONFIG,
        (("...,", 'model="MOE", reward_funcs=reward, train_dataset=dataset,'), SHORT),
        TRAINED,
    ),
}
MOE = """
import torch
from transformers import AutoModelForCausalLM
from mismatch_ext.adapters.transformers import record_routing
model = AutoModelForCausalLM.from_pretrained("MOE", dtype=torch.float32)
tokens = torch.arange(1, 9).repeat(2, 1)
with torch.no_grad(), record_routing(model) as recording:
    model(input_ids=tokens)
recorded_rows = [recording.trace.slice(0, 8)] * 2  # both rows are alike
loss_of = lambda logits: logits.square().mean()
"""
LOOP = """
import tempfile, torch
from pathlib import Path
from mismatch_ext import Run
from tests.unit.loops import sides
kept = tempfile.mkdtemp()
trainer, rollout = sides()
model, optimizer, scheduler = trainer.model, trainer.optimizer, trainer.scheduler
run = Run({}, trainer, rollout, kept).start()
"""
LIGHT: dict[tuple[str, int], tuple[str, tuple[tuple[str, str], ...], str]] = {
    ("docs/trl.md", 2): (TRL + CONFIG, (SHORT,), "\nassert args.mismatch"),
    ("docs/trl.md", 4): ("", (), "\nassert callable(rollout)"),
    ("docs/routing.md", 0): (
        MOE,
        (
            ("traces = ...", "traces = recorded_rows"),
            ("attention_mask = ...", "attention_mask = torch.ones_like(tokens)"),
        ),
        "\nassert replay.forwards == 1",
    ),
    ("docs/stability.md", 0): ("import torch\nmodel = torch.nn.Linear(4, 4)\nheld = model.weight.detach().bfloat16()\n",
        (), "\nassert torch.equal(model.weight.bfloat16(), held) and not torch.equal(model.weight, held.float())"),
    ("docs/loop.md", 1): (
        "",
        (),
        "\nimport tempfile\nfrom mismatch_ext import Run\nfrom tests.unit.loops import learn, sides\n"
        "from tests.unit.rollout_server import serving\ntrainer, engine = sides()\n"
        "with serving(engine) as url, Run({}, trainer, HttpRollout(url), tempfile.mkdtemp()).start() as run:\n"
        "    logs = learn(run, 2)\n"
        "assert logs[-1]['mismatch/weight_sync_gap'] < 1e-6 and logs[-1]['mismatch/logp_abs_diff_mean'] > 1e-3\n",
    ),
    ("docs/loop.md", 2): (
        LOOP,
        (('"runs/mine/checkpoint"', "kept"),),
        "\nassert (folder / 'mismatch.json').is_file() and (folder / 'mine.pt').is_file()",
    ),
    ("docs/loop.md", 3): (
        LOOP + "from tests.unit.loops import learn, save\nfolder = Path(kept)\nlearn(run, 1)\nrun.save(folder)\n"
        "parts = {'model': model, 'optimizer': optimizer, 'scheduler': scheduler}\n"
        "torch.save({name: part.state_dict() for name, part in parts.items()}, folder / 'mine.pt')\nblock = {}\n"
        "run.__exit__(None, None, None)\ntrainer, rollout = sides(1)\nmodel, optimizer = trainer.model, trainer.optimizer\n"
        "scheduler = trainer.scheduler\n",
        (('"runs/mine"', "folder"),),
        "\nassert run.steps == 1 and rollout.weight_version == 2",
    ),
    ("docs/loop.md", 4): (
        "",
        (),
        "\nassert torch.allclose(weights, torch.tensor([[0.1, 0.0, 0.0]]).exp())"  # the comment's figures
        "\nassert gap['logp_abs_diff_mean'] > 0.03 and drift_metrics(sums)['stale/logp_abs_diff_mean'] > 0.04",
    ),
    ("docs/loop.md", 5): (
        "from unittest import mock\nfrom mismatch_ext import MismatchConfig\nblock = MismatchConfig.parse({})\n"
        "from types import SimpleNamespace\nfrom tests.unit.test_sglang_server import GOOD\n"
        "there = SimpleNamespace(server_info=lambda: GOOD | {'dtype': 'bfloat16'})\n"
        "mock.patch('mismatch_ext.adapters.sglang.HttpTransport', return_value=there).start()\n",
        (),
        "\nassert verdict.problems == ()",
    ),
    ("docs/kl.md", 1): ("", (), ""),
}  # fmt: skip
pytestmark = pytest.mark.engine


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)


def pasted(of: tuple[str, int], before: str, filled: tuple[tuple[str, str], ...], after: str, models: Path) -> str:
    """Return a script with a block in it."""
    block = blocks(of[0])[of[1]]
    for stands_there, here in filled:
        assert stands_there in block, (of, stands_there)
        block = block.replace(stands_there, here)
    script = before + block + after
    for name in ("dense", "moe"):
        script = script.replace(f'"{name.upper()}"', repr(str(models / name)))
    return script.replace('output_dir="run"', f"output_dir={str(models / 'run')!r}")


def test_every_block_of_the_pages_is_run_by_a_test() -> None:
    pages = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
    there = {(page, number) for page in pages for number in range(len(blocks(page)))}
    alone = {(page, number) for page, numbers in ALONE.items() for number in numbers}
    assert there == {*TRAINING, *LIGHT} | alone


@pytest.fixture
def models(dense: Path, moe: Path, tmp_path: Path) -> Path:
    """Return a folder with a dense model and a mixture of experts."""
    for name, path in (("dense", dense), ("moe", moe)):
        (tmp_path / name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize(
    "of",
    # The first block of a trainer in every run, what tools and LoRA add to it by night.
    [pytest.param(of, marks=[] if of[1] < 2 else pytest.mark.nightly) for of in TRAINING],
    ids=lambda of: f"{Path(of[0]).stem}-{of[1]}",
)
def test_a_block_that_trains(of: tuple[str, int], models: Path) -> None:
    script = models / "block.py"
    script.write_text(pasted(of, *TRAINING[of], models), encoding="utf-8")
    shell(f"{sys.executable} -u {script}", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert read_run(models / "run/mismatch").steps[-1].metrics["mismatch/logp_abs_diff_mean"] < 0.1


def test_blocks_that_need_no_engine(models: Path) -> None:
    """One process runs all of them, each in a module of its own."""
    scripts = []
    for number, (of, parts) in enumerate(LIGHT.items()):
        scripts.append(models / f"test_block_{number}.py")
        scripts[-1].write_text(pasted(of, *parts, models), encoding="utf-8")
    code = "import runpy, sys\nfor path in sys.argv[1:]:\n    print(path, flush=True)\n    runpy.run_path(path)\n"
    shell(f"{sys.executable} -c '{code}' {' '.join(map(str, scripts))}", PYTHONPATH=str(ROOT))
    # This one is a test itself.
    shell(f"{sys.executable} -m pytest -q -p no:cacheprovider --rootdir {models} {scripts[-1]}", PYTHONPATH=str(ROOT))
