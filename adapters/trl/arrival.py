"""Proof, at every micro-batch, that TRL's own loss is a part of the loss that is stepped.

The KL term and the importance ratios stand in TRL's own `GRPOTrainer._compute_loss`. A subclass may do anything with the result
of that method. If nothing of the result is left, the sections that were asked for would be off in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mismatch_ext.adapters.trl.aggregation import OwnLoss
from mismatch_ext.adapters.trl.correction import native_options
from mismatch_ext.adapters.trl.overridden import shadowed
from mismatch_ext.adapters.trl.sampling_mask import SamplingMaskMixin
from mismatch_ext.patches.trl.own_loss import OWN_LOSS
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.patching import MARKER, applied
from mismatch_ext.presets import resolve

LOSSES = ("training_step", "compute_loss", "_compute_loss", "compute_liger_loss")
"""Methods by which a subclass can make a loss of its own."""
HOSTS = ("mismatch_ext", "transformers")
OWN = "trl.trainer.grpo_trainer"


def sections_in_loss(block: MismatchConfig) -> tuple[str, ...]:
    """Return the sections of a block that have no effect unless TRL's own loss is stepped."""
    found = []
    if block.kl is not None and (block.kl.reward_path != "rewards" or block.kl.placement != "reward"):
        found.append("mismatch.kl")
    if block.correction is not None:
        settings = resolve(block.correction)
        off = {"vllm_importance_sampling_correction": False}
        if native_options(settings) != off or settings.off_policy_threshold is not None:
            found.append("mismatch.correction")
    return tuple(found)


class ArrivalMixin(SamplingMaskMixin):
    """Overrides the methods of Trainer from the one that makes a loss to the one that backpropagates it."""

    # Sections whose terms stand in TRL's own loss; () where nothing has to be proven.
    _in_loss: tuple[str, ...] = ()
    # What TRL's own loss has returned since the outermost method was entered; None outside of one.
    _own_losses: list[Tensor] | None = None
    # Whether the block changes TRL's own loss at all, also where nothing has to be proven: a KL that is only in the rewards
    # switches TRL's own KL term off.
    _around_loss = False
    # Whether there was a loss since the last optimizer step, and TRL's own loss was a part of each.
    _arrived = False
    # Whether TRL's own loss has moved the loss of this trainer before: a slope of 0 is then a clamp, a guard against NaN or a
    # schedule.
    _moved_loss = False

    def _around_own_loss(self, own_loss: OwnLoss, model: Any, inputs: Any) -> Tensor:
        """Compute TRL's own loss and remember it; called instead of TRL's method, inside of any subclass's method."""
        if not self._around_loss:
            return own_loss(self, model, inputs)  # another trainer in the same process has called it
        loss = self._with_terms(own_loss, model, inputs)
        if self._own_losses is None:
            return loss
        self._own_losses.append(loss)
        # Another tensor with the same bits, because a subclass may change what it gets in place.
        return loss * 1.0

    def _with_terms(self, own_loss: OwnLoss, model: Any, inputs: Any) -> Tensor:
        return own_loss(self, model, inputs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch as TRL does.

        Raises:
            ConfigError: TRL's own loss, in which a section stands, is not a part of the loss.
        """
        if not self._around_loss:
            return super().training_step(model, inputs, *args, **kwargs)
        outermost = self.compute_loss

        def proven(*args: Any, **kwargs: Any) -> Any:
            with self._collecting() as own_losses:
                loss = outermost(*args, **kwargs)
            self._prove(loss, own_losses)
            return loss

        with shadowed(self, compute_loss=proven):
            return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does.

        Raises:
            ConfigError: TRL's own loss, in which a section stands, is not a part of it.
        """
        if not self._around_loss or self._own_losses is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with self._collecting() as own_losses:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled() and self.model.training:
            self._prove(loss, own_losses)
        return loss

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if not self._around_loss:
            stock: Tensor = super()._compute_loss(model, inputs)
            return stock
        with self._own_loss_wrapped():
            loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    @contextmanager
    def _own_loss_wrapped(self) -> Iterator[None]:
        own_loss = GRPOTrainer._compute_loss
        if getattr(own_loss, MARKER, None) != OWN_LOSS.name:
            self._check_own(own_loss)
        with applied(OWN_LOSS):
            yield

    def _check_own(self, own_loss: OwnLoss) -> None:
        """Refuse a function that somebody has put instead of TRL's, because what it adds would be taken for TRL's aggregation."""
        home = getattr(own_loss, "__globals__", {}).get("__name__", type(own_loss).__name__)
        if home.partition(".")[0] != "trl":
            raise ConfigError(
                f"{' and '.join(self._in_loss or ('mismatch.kl',))}: GRPOTrainer._compute_loss was replaced by a function of "
                f"{home}; the weight that TRL gives to each token cannot be read off it. Override the method in a subclass, or "
                "remove these sections."
            )

    @contextmanager
    def _collecting(self) -> Iterator[list[Tensor]]:
        outer, own_losses = self._own_losses, list[Tensor]()
        self._own_losses = own_losses
        try:
            with self._own_loss_wrapped():
                yield own_losses
        finally:
            self._own_losses = outer

    def _prove(self, loss: Any, own_losses: list[Tensor]) -> None:
        """Refuse a loss that does not depend on TRL's own; autograd walks only the operations between the two."""
        self._arrived = False
        if not self._in_loss:
            return
        if not own_losses:
            raise self._refusal("the loss was computed without TRL's own GRPOTrainer._compute_loss")
        total = loss[0] if isinstance(loss, tuple) else loss
        own_losses = [own for own in own_losses if own.requires_grad]
        if own_losses and isinstance(total, Tensor) and total.requires_grad:
            found = torch.autograd.grad(total.sum(), own_losses, retain_graph=True, allow_unused=True)
            slopes = [slope for slope in found if slope is not None]
            self._moved_loss = self._moved_loss or any(bool(slope != 0) for slope in slopes)
            self._arrived = self._moved_loss and bool(slopes)
        if not self._arrived:
            raise self._refusal(
                "what TRL's own GRPOTrainer._compute_loss returned has no effect on the loss (its slope is 0)"
            )

    def _refusal(self, what: str) -> ConfigError:
        sections = " and ".join(self._in_loss)
        mine = [
            f"{kind.__name__}.{name}"
            for kind in type(self).__mro__
            for name in LOSSES
            if name in vars(kind) and kind.__module__.partition(".")[0] not in HOSTS and kind.__module__ != OWN
        ]
        where = ", ".join(mine) or "TRL's own settings (use_liger_kernel computes the loss elsewhere)"
        return ConfigError(
            f"{sections} with {type(self).__name__}: {what}, and would be off in silence. Look at {where}: return a loss that "
            f"super()._compute_loss(model, inputs) is a part of, with a factor that is not 0; or remove {sections}."
        )


class ArrivalCallback(TrainerCallback):
    """Refuses an optimizer step for which no loss was proven, for example because a subclass trains by other methods.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: ArrivalMixin) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Refuse the step, or begin anew for the next one."""
        if self._trainer._in_loss and not self._trainer._arrived:
            raise self._trainer._refusal(
                "the loss that is to be stepped came from no compute_loss that could be looked into"
            )
        self._trainer._arrived = False
