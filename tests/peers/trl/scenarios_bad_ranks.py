"""Two ranks, one of which has a row that cannot be trained on, or a pass that is not finite; run as `scenarios_ranks` is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mismatch_ext.errors import NonFiniteLogprobError
from mismatch_ext.ranks import WORLD
from tests.peers.trl.scenarios_attach import FLOAT32, eager
from tests.peers.trl.scenarios_bad_rows import spoiling, weigh_nothing
from tests.peers.trl.scenarios_ranks import both, build, digest_of, main, outcome

ACTS: dict[str, Any] = {"monitor": {"weight_sync": "error", "default_alarms": False, "max_bad_rows": 1.0}}
SPOILED, ROW, BATCH = 1, 3, 2
"""Rank, row and batch of the fault."""


def built(model: str, out: str, **given: Any) -> Any:
    """Build a trainer with an engine on each rank, given sections of its config and other arguments."""
    sections = {name: given.pop(name) for name in ("kl", "monitor") if name in given}
    if "kl" not in sections:
        given["beta"] = 0.1
    with eager():
        return build(model, out, ACTS | sections, use_vllm=True, max_steps=3, **given, **FLOAT32)


def one_bad_row(model: str, out: str) -> None:
    """Train with a fault in one row of 32, on one rank, and without it and with loss weight 0 for this row."""
    found, slopes = [], []
    for fault in (None, "nan"):
        trainer = built(model, f"{out}/{fault}", per_device_train_batch_size=16)
        rows = [ROW] if WORLD.rank == SPOILED else []  # known once the trainer has begun the group
        with spoiling(trainer, fault, rows, [BATCH], alone=True) as noted:
            if fault is None:
                weigh_nothing(trainer, noted)
            found.append(outcome(trainer))
        slopes.append(noted.get("slope"))
    weightless, spoiled = found
    assert spoiled["parameters"] == weightless["parameters"]
    # The row would have had a part in the step.
    first, second = both(slopes[0])
    assert first == 0 < second
    assert bad_rows(spoiled, "rollout_logprobs") == [None, 1.0, 0.0]
    not_finite(model, f"{out}/own")


def bad_rows(run: dict[str, Any], reason: str) -> list[float | None]:
    """Return how many rows were bad for a reason in each step."""
    return [entry.get(f"mismatch/bad_rows/{reason}") for entry in run["logged"]]


def nowhere_finite(model: str, out: str) -> None:
    """Train while what the first pass returns of a batch is finite in no row of one rank, and then in no row of either.

    Each rank has the four rows of a prompt.
    """
    for ranks in ([SPOILED], [0, 1]):
        monitor = ACTS["monitor"] | {"max_bad_rows": 0.4}
        trainer = built(model, f"{out}/{len(ranks)}", monitor=monitor, per_device_train_batch_size=4)
        trainer._get_per_token_logps_and_entropies = _spoiled_pass(trainer, ranks, in_loss=False)
        found = outcome(trainer)
        folder = trainer.mm.log.run_dir
        checkpoints = [path.name for path in folder.parent.glob("checkpoint-*")]
        if ranks == [SPOILED]:
            assert trainer.state.global_step == 3 and checkpoints == []
            assert bad_rows(found, "old_logprobs") == [None, 4.0, 0.0]
        else:
            assert trainer.state.global_step == 2 and checkpoints == ["checkpoint-2"]
            assert [path.name for path in folder.glob("evidence-*")] == ["evidence-2.jsonl.gz"]
            assert bad_rows(found, "old_logprobs") == [None, 8.0]


def _spoiled_pass(trainer: Any, ranks: list[int], *, in_loss: bool) -> Any:
    """Return the scoring pass, which of one batch returns nothing but NaN on some ranks, in its loss or before."""
    score = trainer._get_per_token_logps_and_entropies

    def scored(*args: Any, **kwargs: Any) -> Any:
        logps, *rest = score(*args, **kwargs)
        of_loss = torch.is_grad_enabled() and trainer.mm.rollouts is None
        spoils = WORLD.rank in ranks and trainer.state.global_step == BATCH - 1
        at_once = of_loss if in_loss else trainer.mm.rollouts is not None
        return (logps * torch.nan if at_once and spoils else logps, *rest)

    return scored


def not_finite(model: str, out: str) -> None:
    """Train until one rank's own pass is not finite in the second step, which neither takes."""
    trainer = built(model, out)
    plain, digests = trainer.compute_loss, list[str]()

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        digests.append(digest_of(trainer.model))
        return plain(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = _spoiled_pass(trainer, [SPOILED], in_loss=True)
    trainer.compute_loss = compute_loss
    with pytest.raises(NonFiniteLogprobError, match="the gradient norm of step 2 is nan"):
        trainer.train()
    assert digest_of(trainer.model) == digests[-1] and trainer.state.global_step == 1


if __name__ == "__main__":
    main(globals())
