"""What this package uses of TRL and of what TRL brings along, and what it refuses by name: reads upstream.toml, the list.

This module imports no TRL, so that `mismatch-ext compat` can read it where none is installed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from mismatch_ext.seams import Refusal, read_seams

SOURCES = {
    "trl": "https://github.com/huggingface/trl/blob/v1.16.0/trl/",
    "transformers": "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/",
    "accelerate": "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/",
}
LIST = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SEAMS = read_seams(LIST["hook"], SOURCES)
REFUSALS = tuple(
    Refusal(tuple(row["where"]), feature, row["why"]) for row in LIST["refusal"] for feature in row["features"]
)
