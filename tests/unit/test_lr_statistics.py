"""Lengths over ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mismatch_ext.errors import RecordError
from mismatch_ext.lr import LengthStatistics, LrConfig, LrController, length_statistics


def test_one_rank_by_hand() -> None:
    # (3 + 5 + 8 + 8) / 4, two of four cut off.
    lengths, cut = torch.tensor([3, 5, 8, 8]), torch.tensor([False, False, True, True])
    wanted = LengthStatistics(responses=4, response_length=6.0, truncated_fraction=0.5)
    assert length_statistics(lengths, cut) == wanted
    assert length_statistics(lengths.float(), cut.int()) == wanted
    assert length_statistics(lengths) == LengthStatistics(responses=4, response_length=6.0, truncated_fraction=None)


def test_the_mean_is_over_responses_not_over_ranks() -> None:
    # Ranks with 1, 3 and 0 responses: (10 + 2 + 2 + 2) / 4 = 4, where the mean of means is 6.
    ranks = [torch.tensor([10]), torch.tensor([2, 2, 2]), torch.tensor([], dtype=torch.long)]
    seen: list[Tensor] = []

    def collect(tensor: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        seen.append(tensor)
        return tensor

    for lengths in ranks:
        length_statistics(lengths, lengths >= 10, reduce=collect)
    total = torch.stack(seen).sum(0)
    for lengths in ranks:
        found = length_statistics(lengths, lengths >= 10, reduce=lambda tensor, reduction: total)
        assert found == LengthStatistics(responses=4, response_length=4.0, truncated_fraction=0.25)


def test_sums_are_exact_beyond_float32() -> None:
    # 2^24 + 1 is the first integer that float32 does not hold.
    assert length_statistics(torch.tensor([2**24 + 1])).response_length == 2**24 + 1


def test_no_response_on_any_rank_is_no_statistic() -> None:
    found = length_statistics(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.bool))
    assert found == LengthStatistics(responses=0, response_length=None, truncated_fraction=None)
    controller = LrController(LrConfig())
    state = controller.initial_state()
    assert controller.update(state, step=0, **found.to_dict()) == controller.advance(state, step=0)


@pytest.mark.parametrize(
    ("lengths", "truncated", "message"),
    [
        (torch.tensor([[1]]), None, r"shape \(1, 1\)"),
        (torch.tensor([1, 2]), torch.tensor([True]), r"truncated has shape \(1,\), lengths \(2,\)"),
        (torch.tensor([1, -2]), None, r"lengths\[1\] is -2"),
        (torch.tensor([1.5]), None, r"lengths\[0\] is 1.5"),
        (torch.tensor([1.0, float("nan")]), None, r"lengths\[1\] is nan"),
    ],
)
def test_what_is_no_length_is_refused(lengths: Tensor, truncated: Tensor | None, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        length_statistics(lengths, truncated)


RANK = """
import json, os, sys
import torch, torch.distributed as dist
from mismatch_ext.lr import LrConfig, LrControl, LrController, length_statistics

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
generator = torch.Generator().manual_seed(rank)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
config = LrConfig(floor=0.5, baseline_window=5)
control = LrControl(optimizer, LrController(config))
multipliers = []
for step in range(40):
    # Rank 0 alone surges, at step 20, and rank 1 has no response in every other batch.
    count = 6 if rank == 0 or step % 2 else 0
    level = 900 if rank == 0 and step >= 20 else 100
    lengths = torch.randint(level, level + 40, (count,), generator=generator)
    multipliers.append(control.update(**length_statistics(lengths, lengths > 930).to_dict()))
    optimizer.step()
with open(out, "w") as file:
    json.dump([multipliers, control.state_dict()], file)
dist.barrier()
os._exit(0)  # gloo's threads can abort an interpreter that shuts down in order
"""


def test_two_ranks_agree_to_the_last_bit(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store"), str(tmp_path / f"{rank}.json")]
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[0][:20] == [1.0] * 20 and first[0][-1] == 0.5
