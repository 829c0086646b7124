"""The evidence in slices, each of at most twelve minutes on two idle cores, and which of them a commit runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.evidence.machine import git

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Files of tests/evidence that run together.

    Args:
        title: What is claimed in them.
        files: Names of the files, without `test_` and `.py`.
        jobs: Files that run at once; 1 where times are measured.
    """

    title: str
    files: tuple[str, ...]
    jobs: int = 2

    def paths(self) -> list[str]:
        """Return the files as pytest takes them."""
        return [f"tests/evidence/test_{name}.py" for name in self.files]


SLICES = (
    Slice(title="the demo: bf16, FP16 and float32, dense and with experts", files=("demo",), jobs=1),
    Slice(title="routing replay on the same tokens", files=("replay_gap",), jobs=1),
    Slice(title="the demo with experts, trained; the examples' own figures", files=("demo_moe", "examples")),
    Slice(title="costs, as ratios of processor time; KL placement", files=("bench", "kl_placement"), jobs=1),
    Slice(title="README's blocks and installation; learning rate against gap, quick", files=("readme", "lr_gap")),
    Slice(title="the ends of the supported ranges, quick", files=("matrix",), jobs=1),
    Slice(title="verl's main_ppo with vLLM: float32, float16 and replay", files=("main_ppo",), jobs=1),
    Slice(title="verl's main_ppo: with SGLang in float16, and faults", files=("main_ppo_sglang", "main_ppo_faults")),
)


def pick(commits: int, commit: str, shallow: bool) -> tuple[int, str]:
    """Return the number of the slice, from 1, that a commit runs, and why.

    Args:
        commits: Commits up to this one; 0 where there is no checkout.
        commit: Its hash, hexadecimal.
        shallow: Whether older commits are missing, so that their number says nothing.
    """
    if commits and not shallow:
        return commits % len(SLICES) + 1, f"commit number {commits} modulo {len(SLICES)}, plus 1"
    if commit:
        return int(commit[:8], 16) % len(
            SLICES
        ) + 1, f"a shallow clone: commit {commit[:8]} modulo {len(SLICES)}, plus 1"
    return 1, "not a git checkout: the first"


def picked() -> tuple[int, str]:
    """Return the slice that this checkout's commit runs, and why."""
    return pick(
        int(git("rev-list", "--count", "HEAD") or 0),
        git("rev-parse", "HEAD"),
        git("rev-parse", "--is-shallow-repository") == "true",
    )
