"""Write prompts.jsonl, addition problems that the shipped models know: `python -m examples.doctor.prompts`."""

from __future__ import annotations

import json
from pathlib import Path

from examples.arithmetic.task import make_dataset

FILE = Path(__file__).with_name("prompts.jsonl")
COUNT, SEED = 128, 7000


def lines() -> str:
    """Return the file's text."""
    return "".join(f"{json.dumps({'prompt': row['prompt']})}\n" for row in make_dataset(COUNT, seed=SEED))


if __name__ == "__main__":
    FILE.write_text(lines(), encoding="utf-8")
