"""GRPOTrainer and RLOOTrainer with the `mismatch:` block; `run.TrlRun` or `attach.Attached` does the work, as `trainer.mm`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.trl.attach import Attached
from mismatch_ext.adapters.trl.behavior import check_loss
from mismatch_ext.adapters.trl.config import MismatchConfigMixin
from mismatch_ext.adapters.trl.engines import UNCOMPILED
from mismatch_ext.adapters.trl.refusals import STITCHING, TRAINERS, check_peers, refuse
from mismatch_ext.adapters.trl.run import TrlRun
from mismatch_ext.patches.trl.engine_arguments import engine_arguments
from torch import Tensor
from transformers import TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.patching import Patch, applied, described

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object


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
        refuse(TRAINERS, type(self), block)
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

    # One rollout, in its order.

    def _generate_and_score_completions(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return _through(self._acting, "make_batch", super()._generate_and_score_completions, inputs, *args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return _through(self._acting, "generated", super()._generate, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return _through(self._acting, "score_rows", super()._get_per_token_logps_and_entropies, model, *args, **kwargs)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        given = (inputs, prompts, completions, completion_ids_list, *args)
        rewards: Tensor = _through(self._acting, "rewarded", super()._calculate_rewards, *given, **kwargs)
        return rewards

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return _through(self._acting, "loss", super()._compute_loss, model, inputs, *args, **kwargs)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return _through(self._acting, "grad_norm", super()._get_grad_norm, *args, **kwargs)

    def _get_learning_rate(self, *args: Any, **kwargs: Any) -> float:
        """Return the rate that the last step applied."""
        rate: float = _through(self._acting, "learning_rate", super()._get_learning_rate, *args, **kwargs)
        return rate

    # Trainings, logs, evaluations and checkpoints.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; the metrics file says how it ended."""
        return _through(self._acting, "train", super().train, resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with the mismatch metrics added, and write the same numbers to the run directory."""
        _through(self._acting, "logged", super().log, logs, *args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Evaluate as TRL does; the gap on each evaluation set is kept apart."""
        return _through(
            self._acting, "evaluate", super().evaluate, eval_dataset, ignore_keys, metric_key_prefix, **kwargs
        )

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        _through(self._acting, "save", super()._save_checkpoint, model, trial, *args, **kwargs)


def _through(acting: TrlRun | None, method: str, host: Any, *args: Any, **kwargs: Any) -> Any:
    """Call TRL's method through the run's, which takes it first; without a config that acts, call it alone."""
    if acting is None:
        return host(*args, **kwargs)
    return getattr(acting, method)(host, *args, **kwargs)


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
