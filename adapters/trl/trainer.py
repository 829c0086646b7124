"""GRPOTrainer and RLOOTrainer with the `mismatch:` block; `run.TrlRun` or `attach.Attached` does the work, as `trainer.mm`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.trl.attach import Attached
from mismatch_ext.adapters.trl.behavior import check_loss
from mismatch_ext.adapters.trl.config import MismatchConfigMixin
from mismatch_ext.adapters.trl.engines import UNCOMPILED
from mismatch_ext.adapters.trl.refusals import STITCHING, check_peers, refuse
from mismatch_ext.adapters.trl.run import TrlRun
from mismatch_ext.patches.trl.engine_arguments import engine_arguments
from transformers import TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.patching import Patch, applied, described

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object

OVERRIDES = {
    # One rollout, in its order.
    "_generate_and_score_completions": "make_batch",
    "_generate": "generated",
    "_get_per_token_logps_and_entropies": "score_rows",
    "_calculate_rewards": "rewarded",
    "_compute_loss": "loss",
    "_get_grad_norm": "grad_norm",
    "_get_learning_rate": "learning_rate",
    # Trainings, logs, evaluations and checkpoints.
    "train": "train",
    "log": "logged",
    "evaluate": "evaluate",
    "_save_checkpoint": "save",
}
"""TRL's methods, and those of `run.TrlRun` that call them."""


class MismatchTrainerMixin(_Host):
    """Adds the `mismatch:` block to a GRPOTrainer or to a subclass of one.

    `class MyTrainer(MismatchTrainerMixin, MyGRPOTrainer)` puts the block's terms outside of your `_compute_loss`, and
    `class MyTrainer(MyLoss, MismatchGRPOTrainer)` puts them inside. Without a block every method passes straight on, and so it
    does with a config that does not act: the trainer is then measured as by `attach`.

    Attributes:
        mm: The run, with its log and the verdict of its last weight update; None without a block.
    """

    mm: TrlRun | Attached | None = None
    _acting: TrlRun | None = None  # the same, if the config acts

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("args") or next((a for a in args if isinstance(a, MismatchConfigMixin)), None)
        block = config.mismatch_block() if isinstance(config, MismatchConfigMixin) else None
        if block is None:
            if not isinstance(config, MismatchConfigMixin):
                given = next((type(a).__name__ for a in (config, *args) if isinstance(a, TrainingArguments)), "no args")
                warnings.warn(
                    f"{type(self).__name__} with {given}: nothing is measured, and training is TRL's own. Use "
                    "MismatchGRPOConfig(mismatch={...}), or MismatchRLOOConfig for RLOO.",
                    stacklevel=2,
                )
            super().__init__(model, *args, **kwargs)
            return
        refuse("class", type(self), block)
        if not block.acts:
            with applied(*_uncompiled(config)) as patches:
                super().__init__(model, *args, **kwargs)
            self.mm = Attached(self, block, patches)
            return
        self.mm = self._acting = run = TrlRun(self, block, config)
        _check(type(self), block, config, run, kwargs)
        with applied(*run.construction_patches(config)) as patches:
            # The patches of each step are checked here, before a model or an engine is built.
            run.patches = [*patches, *described(*run.step_patches(config))]
            super().__init__(model, *args, **kwargs)
        run.begin()

    def create_accelerator_and_postprocess(self, *args: Any, **kwargs: Any) -> None:
        """Create the accelerator, with a loss scaler that is on wherever float16 was asked for, and check the model."""
        config: Any = self.args
        knows_config = isinstance(config, MismatchConfigMixin)
        with config.claimed() if knows_config else nullcontext():
            super().create_accelerator_and_postprocess(*args, **kwargs)
        if self._acting is not None:
            self._acting.accelerator_created()


def _through(name: str, step: str) -> Any:
    """Return a method that calls TRL's of this name through a step of the run, which takes it first; alone if no config acts."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        host = getattr(super(MismatchTrainerMixin, self), name)
        if self._acting is None:
            return host(*args, **kwargs)
        return getattr(self._acting, step)(host, *args, **kwargs)

    method.__name__ = name
    return method


# The arguments of TRL's methods are passed on as they come, so that a later release may add some.
for _name, _step in OVERRIDES.items():
    setattr(MismatchTrainerMixin, _name, _through(_name, _step))


def _uncompiled(config: Any) -> list[Patch]:
    """Return the patch that starts an engine on a CPU as with a config that acts; none for other devices."""
    here = config.use_vllm and config.vllm_mode == "colocate"
    return [engine_arguments(UNCOMPILED)] if here and config.device.type == "cpu" else []


def _check(trainer: type[Any], block: MismatchConfig, config: Any, run: TrlRun, kwargs: Any) -> None:
    """Refuse what can be judged before a model or an engine is built."""
    stitches = any(kwargs.get(key) for key in STITCHING)
    if stitches and block.kl is not None and block.kl.in_rewards:
        raise ConfigError(
            "mismatch.kl.reward_path='rewards' with tools, an environment or a rollout_func: which tokens are the policy's is "
            "not known when rewards are computed; use reward_path='surrogate'."
        )
    run.centering.check(stitches=stitches)
    server = config.vllm_mode == "server"
    check_peers(trainer, block, use_vllm=config.use_vllm, server=server, stitches=stitches)
    run.reads_more = check_loss(trainer, block, getattr(config, "loss_type", ""), config)


class MismatchGRPOTrainer(MismatchTrainerMixin, GRPOTrainer):
    """Drop-in `GRPOTrainer` that takes a `MismatchGRPOConfig`."""


class MismatchRLOOTrainer(MismatchTrainerMixin, RLOOTrainer):  # type: ignore[misc]  # TRL's two trainers differ in their types
    """Drop-in `RLOOTrainer` that takes a `MismatchRLOOConfig`: precision, routing, lr and monitor."""
