"""Let a trainer stand around TRL's own loss, inside whatever its subclasses make of that loss."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mismatch_ext.patching import Patch, swapped

SEAM = "_around_own_loss"
"""Method of a trainer that is called in the place of TRL's function, with that function as its first argument."""

_LOCK = threading.Lock()
_INSIDE: list[None] = []
_UNDO = ExitStack()


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        around = getattr(self, SEAM, None)
        return original(self, model, inputs) if around is None else around(original, model, inputs)

    return _compute_loss


OWN_LOSS = Patch(
    name="trl/own_loss",
    peer="trl",
    supports=">=1.13.0,<=1.16.0",
    target="trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
    make=_make,
    source_digests={"73cbb28d2330ad20": "1.13.0 to 1.14.2", "535b2556a8aebf09": "1.15.0 and 1.16.0"},
    upstream="https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_trainer.py",
    reason=(
        "a subclass's own terms, scales and scoring passes lie around TRL's KL term and importance ratio; what takes their "
        "place has to lie there too, and a class among a trainer's bases cannot get below the user's own."
    ),
    not_covered="A reference to the function that was taken before, and losses that do not call it: a run with those is refused.",
    remove_when="GRPOTrainer has a method of its own for the KL term and the weights of the per-token loss.",
)


@contextmanager
def own_loss_wrapped(check: Callable[[Any], None]) -> Iterator[None]:
    """Wrap TRL's own loss for the time of a block.

    The class is the whole process's, and blocks of several threads may end in any order: the function is replaced for the first
    and restored after the last.

    Args:
        check: Is given the function before it is wrapped, and raises where it must not be.

    Raises:
        PatchError: This version of TRL was not tested, or its function is not where it was.
    """
    with _LOCK:
        if not _INSIDE:
            check(importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss)
            _UNDO.enter_context(swapped(OWN_LOSS))
        _INSIDE.append(None)
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE.pop()
            if not _INSIDE:
                _UNDO.close()
