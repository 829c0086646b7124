"""Two ranks, one of which has a row that cannot be trained on, or a pass that is not finite; run as `scenarios_ranks` is."""

from __future__ import annotations

import os
from typing import Any

import torch

from mismatch_ext.errors import MismatchError
from tests.peers.trl.scenarios_attach import FLOAT32, eager
from tests.peers.trl.scenarios_bad_rows import spoiling, weigh_nothing
from tests.peers.trl.scenarios_ranks import build, digest_of, main, outcome

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


def one_bad_row(model: str, out: str) -> dict[str, Any]:
    """Train with a fault in one row of 32, on one rank, and without it and with loss weight 0 for this row."""
    rows = [ROW] if int(os.environ["RANK"]) == SPOILED else []
    found: dict[str, Any] = {}
    for fault in (None, "nan"):
        trainer = built(model, f"{out}/{fault}", per_device_train_batch_size=16)
        with spoiling(trainer, fault, rows, [BATCH]) as noted:
            if fault is None:
                weigh_nothing(trainer, noted)
            found[str(fault)] = outcome(trainer) | {"slope": noted.get("slope")}
    return found | {"own pass": not_finite(model, f"{out}/own")}


def nowhere_finite(model: str, out: str) -> dict[str, Any]:
    """Train while what the first pass returns of a batch is finite in no row of one rank, and then in no row of either."""
    found: dict[str, Any] = {}
    for ranks in ([SPOILED], [0, 1]):
        monitor = ACTS["monitor"] | {"max_bad_rows": 0.4}
        trainer = built(model, f"{out}/{len(ranks)}", monitor=monitor, per_device_train_batch_size=4)
        trainer._get_per_token_logps_and_entropies = _without_finite(trainer, ranks)
        kept = outcome(trainer)
        folder = trainer.mm.log.run_dir
        found[str(len(ranks))] = kept | {
            "steps": trainer.state.global_step,
            "checkpoints": sorted(path.name for path in folder.parent.glob("checkpoint-*")),
            "evidence": sorted(path.name for path in folder.glob("evidence-*")),
        }
    return found


def _without_finite(trainer: Any, ranks: list[int]) -> Any:
    """Return the scoring pass, which of one batch returns nothing but NaN on some ranks."""
    score = trainer._get_per_token_logps_and_entropies

    def scored(*args: Any, **kwargs: Any) -> Any:
        logps, *rest = score(*args, **kwargs)
        fresh = trainer.mm.rollouts is not None
        spoils = trainer.accelerator.process_index in ranks and trainer.state.global_step == BATCH - 1
        return (logps * torch.nan if fresh and spoils else logps, *rest)

    return scored


def own_pass_with_kl(model: str, out: str) -> dict[str, Any]:
    """Train as `not_finite` does, with this package's KL term, whose loss looks at the log-probabilities."""
    return not_finite(model, out, kl={"coef": 0.1})


def not_finite(model: str, out: str, **sections: Any) -> dict[str, Any]:
    """Train until one rank's own pass is not finite in the second step; return how each rank ended, and its weights around it."""
    trainer = built(model, out, **sections)
    plain, digests = trainer.compute_loss, list[str]()
    score = trainer._get_per_token_logps_and_entropies

    def scored(*args: Any, **kwargs: Any) -> Any:
        logps, *rest = score(*args, **kwargs)
        in_loss = torch.is_grad_enabled() and trainer.mm.rollouts is None
        spoils = trainer.accelerator.process_index == SPOILED and trainer.state.global_step == BATCH - 1
        return (logps * torch.nan if in_loss and spoils else logps, *rest)

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        digests.append(digest_of(trainer.model))
        return plain(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = scored
    trainer.compute_loss = compute_loss
    error = ""
    try:
        trainer.train()
    except MismatchError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "error": error,
        "before": digests[-1],
        "after": digest_of(trainer.model),
        "steps": trainer.state.global_step,
    }


if __name__ == "__main__":
    main(globals())
