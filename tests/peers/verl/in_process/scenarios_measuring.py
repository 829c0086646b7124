"""What ranks measure of their parts of a batch, added up as verl's driver does, without Ray."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.verl.driver.kl import groups
from mismatch_ext.adapters.verl.driver.measuring import MeasuringMixin
from mismatch_ext.adapters.verl.worker.measuring import PartMeasured, fields_of, measured
from mismatch_ext.adapters.verl.worker.spread import _blocks, shares
from tensordict import TensorDict
from torch import Tensor

from mismatch_ext.config import MismatchConfig
from mismatch_ext.gap import gap_metrics, gap_profiles, gap_sample, gap_sums
from mismatch_ext.log import RunLog
from mismatch_ext.sums import Sums
from tests.peers.verl.in_process.routes import nested, refused

PROMPTS, RESPONSES = (6, 5, 4, 6, 3, 7, 5), (8, 17, 6, 3, 1, 30, 12)
FILLED_UP = 4
"""The row that verl has filled the batch up with, of no sampled token."""
STEP = 4


def rows(seed: int = 0) -> tuple[TensorDict, Tensor]:
    """Return a batch with a tool's tokens between the policy's, and the trainer's log-probabilities of all of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    masks, rollout, whole = [], [], []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        mask = torch.ones(response, dtype=torch.int64)
        mask[5:9] = 0
        masks.append(torch.zeros_like(mask) if row == FILLED_UP else mask)
        rollout.append(-2 * torch.rand(response, generator=generator))
        found = -2 * torch.rand(prompt + response, generator=generator)
        # The token at a place is scored by the row before it.
        found[prompt - 1 : -1] = rollout[-1] + 0.01 * torch.randn(response, generator=generator)
        whole.append(found)
    fields = {"rollout_log_probs": nested(rollout), "response_mask": nested(masks)}
    return TensorDict(fields, batch_size=len(masks)), nested(whole)


def driver(folder: str) -> Any:
    """Return verl's driver as far as it adds parts up."""
    found: Any = MeasuringMixin()
    found._log = RunLog(MismatchConfig(), Path(folder), info=dict, step=lambda: STEP)
    found.global_steps = STEP
    found.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(response_length=17)))
    return found


def parts_of(data: TensorDict, logprobs: Tensor, sizes: tuple[int, ...], **options: Any) -> list[PartMeasured]:
    """Let each of so many rows be measured by a rank of its own."""
    found, first = [], 0
    for part, size in enumerate(sizes):
        chosen = range(first, first + size)
        own = TensorDict(
            {name: nested([data[name][row] for row in chosen]) for name in ("rollout_log_probs", "response_mask")},
            batch_size=size,
        )
        found.append(
            measured(fields_of(own), part=part, log_probs=nested([logprobs[row] for row in chosen]), **options)
        )
        first += size
    return found


def batch() -> Any:
    """Return verl's keys of the batch."""
    tags = [{"is_padding": row == FILLED_UP} for row in range(len(RESPONSES))]
    return SimpleNamespace(keys=[f"prompt_{row}_0" for row in range(len(RESPONSES))], tags=tags)


def figures(sums: Sums) -> dict[str, Any]:
    """Return everything that is measured."""
    return {"scalars": gap_metrics(sums), "profiles": gap_profiles(sums)}


def parts() -> dict[str, Any]:
    """Compare what ranks measure of their parts, in every order, with what one process measures of the whole, padded."""
    data, logprobs = rows()
    mask = data["response_mask"].to_padded_tensor(0).bool()
    rollout = data["rollout_log_probs"].to_padded_tensor(0.0)
    old = torch.zeros_like(rollout)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        old[row, :response] = logprobs[row][prompt - 1 : prompt - 1 + response]
    found: dict[str, Any] = {"whole": figures(gap_sums(old, rollout, mask)), "parts": []}
    with tempfile.TemporaryDirectory() as folder:
        host = driver(folder)
        for sizes in ((7,), (4, 3), (2, 2, 2, 1)):
            measured_parts = parts_of(data, logprobs, sizes, **host._log.part())
            for order in itertools.permutations(measured_parts):
                host.actor_rollout_wg = SimpleNamespace(mismatch_measured=lambda order=order: list(order))
                gap, known = host._collected(batch())
                stated = host._known(batch(), known, gap_metrics(gap))
                found["parts"].append(
                    {
                        **figures(gap), "lengths": stated.lengths.tolist(), "truncated": stated.truncated.tolist(),
                        "drawn": len(gap_sample(gap)["old_logprobs"]),
                        "bytes": sum(value.numel() * value.element_size() for value in gap.values()),
                    }
                )  # fmt: skip
    found["tokens"] = [int(row.sum()) for number, row in enumerate(mask) if number != FILLED_UP]
    return found


def unfit() -> dict[str, Any]:
    """Say what becomes of values that are no log-probabilities, by the side and the row that they are of."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        host = driver(folder)
        for name, (side, row, token, value) in {
            "sampled": ("rollout", 5, 9, float("nan")),
            "infinite": ("rollout", 2, 0, float("-inf")),
            "a tool's": ("rollout", 1, 6, float("nan")),
            "filled up": ("rollout", FILLED_UP, 0, float("nan")),
            "trainer's": ("trainer", 6, 11, float("inf")),
        }.items():
            data, logprobs = rows()
            if side == "rollout":
                data["rollout_log_probs"][row][token] = value
            else:
                logprobs[row][PROMPTS[row] - 1 + token] = value
            found[name] = refused(host._added_up, batch(), parts_of(data, logprobs, (4, 3)))
        data, logprobs = rows()
        lost = parts_of(data, logprobs, (4, 3))
        found["a rank is missing"] = refused(host._added_up, batch(), lost[:1])
        short = [data["rollout_log_probs"][row][: 9 if row == 5 else None] for row in range(len(RESPONSES))]
        data["rollout_log_probs"] = nested(short)
        found["short"] = refused(host._added_up, batch(), parts_of(data, logprobs, (4, 3)))
        found["absent"] = refused(
            host._added_up, batch(), [measured({"rollout_log_probs": None, "response_mask": None}, part=0)]
        )
    return found


def spreading() -> dict[str, Any]:
    """Hand out the prompts of a batch to ranks, some of more answers than are fetched at a time and one of several outputs."""
    answers = [3, 80, 1, 40, 30, 2, 64]
    keys = [f"prompt{prompt}_{answer}_0" for prompt, count in enumerate(answers) for answer in range(count)]
    keys += ["turns_0_0", "turns_0_1", "turns_1_0", "prompt0_3_0"]
    found = groups(keys)
    return {
        "keys": keys, "groups": found,
        "ranks": {ranks: shares(found, ranks) for ranks in (1, 3, 16)},
        "blocks": list(_blocks(found)),
    }  # fmt: skip
