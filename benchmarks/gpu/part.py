"""What a part of the benchmark is, and what all parts are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.gpu.svg import Figure

Found = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What decides the results of a run, apart from machine and versions.

    Args:
        device: As torch has it: "cuda" or "cpu".
        size: Of the models, a key of `models.SIZES`.
        quick: The same code with little of everything: it shows that the code runs, and no figure.
        seed: Of weights, prompts and samples.
        seeds: How often the runs that learn are repeated, from `seed` on.
        model: Folder of a checkpoint of transformers; empty for random weights.
        prompts: File of prompts for the checkpoint, as the doctor takes it; empty for a few that are built in.
        engine: What samples beside transformers' cached decode: "", "vllm" or "sglang".
    """

    device: str
    size: str
    quick: bool = False
    seed: int = 0
    seeds: int = 3
    model: str = ""
    prompts: str = ""
    engine: str = ""

    @property
    def responses(self) -> int:
        """Responses that are sampled for one figure of the gap."""
        return 8 if self.quick else 512

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return 6 if self.quick else 64

    @property
    def new_tokens(self) -> int:
        """Most tokens of a response."""
        return 12 if self.quick else 256

    @property
    def rows(self) -> int:
        """Responses that are sampled at once."""
        return 8 if self.quick else 256

    def data(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    def generator(self, offset: int = 0) -> torch.Generator:
        """Return a generator on the device.

        Args:
            offset: Tells generators of one run apart.
        """
        return torch.Generator(self.device).manual_seed(1000 * self.seed + offset)


class Part(Protocol):
    """One part; a module with these names is one.

    Attributes:
        NAME: Of its results' file, and of its section in the record.
        TITLE: What it measures, for the progress bar and the page.
    """

    NAME: str
    TITLE: str

    def run(self, setting: Setting, folder: Path, say: Say) -> Found:
        """Measure.

        Args:
            setting: Of the whole run.
            folder: For files that the part needs while it runs.
            say: Told what is measured next.

        Returns:
            JSON-able; what is under "points" is drawn and not recorded.
        """

    def figures(self, found: Found) -> dict[str, Figure]:
        """Return what is drawn of results, by the name of the file."""


def synchronize(device: str | torch.device) -> None:
    """Wait for what was started on a GPU; on a CPU there is nothing to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
