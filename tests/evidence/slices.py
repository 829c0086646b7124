"""The evidence in slices, each meant to take at most twelve minutes on two idle cores, and which of them is due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.turns import turn as in_turn


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
    Slice(
        title="costs, as ratios of processor time; KL placement", files=("bench", "verl_scale", "kl_placement"), jobs=1
    ),
    Slice(title="README's blocks and installation; learning rate against gap, quick", files=("readme", "lr_gap")),
    Slice(title="verl's main_ppo with vLLM: float32, float16 and replay", files=("main_ppo",), jobs=1),
    Slice(
        title="verl's main_ppo: with SGLang in float16 and with spoiled turns, a hang, faults, and faults that are observed",
        files=("main_ppo_hang", "main_ppo_sglang", "main_ppo_faults", "observe"),
    ),
    Slice(title="verl's main_ppo: numerics told from drift", files=("main_ppo_drift",), jobs=1),
    Slice(title="100 kills over TRL, each resumed", files=("kills",), jobs=1),
    Slice(title="kills over verl's main_ppo, each resumed", files=("kills_verl",), jobs=1),
    Slice(
        title="asynchronous: TRL's example, scored again; verl's modes, stock without a block, and turns",
        files=("async_example", "main_ppo_modes"),
    ),
    Slice(title="verl's colocate_async, ended in every way and resumed", files=("main_ppo_colocate_ended",), jobs=1),
    Slice(title="verl's separate_async, ended in every way and resumed", files=("main_ppo_separate_ended",), jobs=1),
    Slice(title="verl's main_ppo on two ranks: two servers, and two engines of one", files=("main_ppo_ranks",), jobs=1),
    Slice(title="the doctor: clean runs, and faults of requests to vLLM", files=("doctor", "doctor_requests")),
    Slice(title="the doctor: faults of vLLM itself, with experts too", files=("doctor_engine", "doctor_experts")),
    Slice(title="the doctor: faults of vLLM, from logged rollouts alone", files=("doctor_logged",), jobs=1),
    Slice(title="the quick start and the doctor's stories, as the docs tell them", files=("doctor_story",), jobs=1),
    Slice(title="the doctor: faults of vLLM's server, over HTTP alone", files=("doctor_http",), jobs=1),
    Slice(
        title="SGLang in half precision; the doctor: clean runs of SGLang, and faults of it",
        files=("sglang_half", "doctor_sglang"),
        jobs=1,
    ),
    Slice(title="the doctor: faults that it was not written for", files=("doctor_later",), jobs=1),
    Slice(title="stability: a clip on the ratio to the engine, and its controls", files=("stability",), jobs=1),
    Slice(
        title="quantised engines: the gap by format, an error that grows, and hosts with one",
        files=("quantised",),
        jobs=1,
    ),
)


def pick(dates: Sequence[str | None], commits: int) -> tuple[int, str]:
    """Return the number of the slice, from 1, that is due, and why.

    Pairs of commits count, since stacks have the odd commits (`tests/turns.py`). On even numbers of pairs all slices take turns.
    Commits that land together would skip some; so on odd numbers it is the slice whose evidence is oldest or missing, and of
    those as old as each other the pairs pick again.

    Args:
        dates: When the oldest evidence of each slice was measured; empty where some is missing, None where it writes none.
        commits: Commits up to this one; 0 where there is no checkout.
    """
    pairs, turn = commits // 2, commits // 4
    if pairs % 2 == 0:
        return in_turn(len(dates), turn) + 1, f"the turn of commit number {commits}"
    oldest = min(date for date in dates if date is not None)
    due = [number for number, date in enumerate(dates, start=1) if date == oldest]
    age = f"measured {oldest}" if oldest else "not recorded"
    place = in_turn(len(due), turn)
    return due[place], f"its evidence is {age}, of {len(due)} slices number {place + 1} at commit {commits}"
