"""GRPOTrainer and RLOOTrainer with the `mismatch:` block; `run.TrlRun` does the work, as `trainer.mm`."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.trl.behavior import check_loss
from mismatch_ext.adapters.trl.config import MismatchConfigMixin
from mismatch_ext.adapters.trl.refusals import STITCHING, TRAINERS, check_peers, refuse
from mismatch_ext.adapters.trl.run import TrlRun
from torch import Tensor
from transformers import TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, SeamError
from mismatch_ext.patching import applied, described, digest_of
from mismatch_ext.versions import PEERS, installed

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object


class MismatchTrainerMixin(_Host):
    """Adds the `mismatch:` block to a GRPOTrainer or to a subclass of one.

    `class MyTrainer(MismatchTrainerMixin, MyGRPOTrainer)` puts the block's terms outside of your `_compute_loss`, and
    `class MyTrainer(MyLoss, MismatchGRPOTrainer)` puts them inside. Without a block every method passes straight on.

    Attributes:
        mm: The block's side of this trainer; None without a block.
    """

    mm: TrlRun | None = None

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
        self.mm = mm = TrlRun(self, block, config)
        _check(type(self), block, config, mm, kwargs)
        patched = mm.checks.around("patches", applied(*mm.construction_patches(config)))
        with patched as patches:
            # The patches of each step are checked here, before a model or an engine is built.
            mm.patches = [] if patches is None else [*patches, *described(*mm.step_patches(config))]
            super().__init__(model, *args, **kwargs)
        mm.begin("none" if patches is None else digest_of(mm.patches))

    def create_accelerator_and_postprocess(self, *args: Any, **kwargs: Any) -> None:
        """Create the accelerator, with a loss scaler that is on wherever float16 was asked for, and check the model."""
        if self.mm is None:
            super().create_accelerator_and_postprocess(*args, **kwargs)
            return
        config: Any = self.args
        with config.claimed():
            super().create_accelerator_and_postprocess(*args, **kwargs)
        self.mm.accelerator_created()

    # One rollout, in its order.

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        host = super()._generate_and_score_completions
        if self.mm is None:
            return host(*args, **kwargs)
        with self.mm.batch() as batch:
            return self.mm.scored(batch, host(*args, **kwargs))

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        host = super()._generate
        return host(*args, **kwargs) if self.mm is None else self.mm.generated(host, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        host = super()._get_per_token_logps_and_entropies
        return host(model, *args, **kwargs) if self.mm is None else self.mm.scoring.score(host, model, *args, **kwargs)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        host, given = super()._calculate_rewards, (inputs, prompts, completions, completion_ids_list, *args)
        return host(*given, **kwargs) if self.mm is None else self.mm.rewarded(host, *given, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch as TRL does."""
        host = super().training_step
        return host(*args, **kwargs) if self.mm is None else self.mm.objective.trained(host, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, under the routes and over the masks that traveled with the micro-batch."""
        host = super().compute_loss
        if self.mm is None:
            return host(model, inputs, *args, **kwargs)
        return self.mm.scoring.loss(host, model, inputs, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        host: Any = super()._compute_loss
        if self.mm is None:
            return host(model, inputs, *args, **kwargs)
        self.mm.scoring.expect_micro_batch()
        loss = self.mm.objective.loss(host, model, inputs, *args, **kwargs)
        if host.__module__.startswith("trl."):
            # Otherwise a user's loss inside of ours may give TRL's own a part of the rows.
            self.mm.scoring.expect_replayed(inputs, every=True)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        if self.mm is not None:
            self.mm.grad_norm(norm)
        return norm

    def _get_learning_rate(self, *args: Any, **kwargs: Any) -> float:
        """Return the rate that the last step applied."""
        scheduled = super()._get_learning_rate(*args, **kwargs)
        return scheduled if self.mm is None or self.mm.lr is None else scheduled * self.mm.lr.applied

    # Trainings, logs, evaluations and checkpoints.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; the metrics file says how it ended."""
        training = nullcontext() if self.mm is None else self.mm.training(resume_from_checkpoint)
        with training:
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with the mismatch metrics added, and write the same numbers to the run directory."""
        if self.mm is None:
            super().log(logs, *args, **kwargs)
        else:
            self.mm.logged(super().log, logs, *args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """Evaluate as TRL does; the gap on each evaluation set is kept apart."""
        with nullcontext() if self.mm is None else self.mm.evaluation(metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        if self.mm is not None:
            self.mm.save(trial)
        super()._save_checkpoint(model, trial, *args, **kwargs)


def _check(trainer: type[Any], block: MismatchConfig, config: Any, mm: TrlRun, kwargs: Any) -> None:
    """Refuse what can be judged before a model or an engine is built."""
    refuse(TRAINERS, trainer, block)
    stitches = any(kwargs.get(key) for key in STITCHING)
    if stitches and block.kl is not None and block.kl.in_rewards:
        raise ConfigError(
            "mismatch.kl.reward_path='rewards' with tools, an environment or a rollout_func: which tokens are the policy's is "
            "not known when rewards are computed; use reward_path='surrogate'."
        )
    with mm.checks.checking("versions"):
        _check_overrides(trainer)
        server = config.vllm_mode == "server"
        check_peers(trainer, block, use_vllm=config.use_vllm, server=server, stitches=stitches)
        mm.objective.reads = check_loss(trainer, block, getattr(config, "loss_type", ""), config)


def _check_overrides(trainer: type[Any]) -> None:
    """Refuse a TRL or transformers that lacks a method which ours overrides, because nobody would call ours."""
    hosts = [kind for kind in trainer.__mro__ if kind.__module__.partition(".")[0] in ("trl", "transformers")]
    for name, method in vars(MismatchTrainerMixin).items():
        if not inspect.isfunction(method):
            continue
        host = next((vars(kind)[name] for kind in hosts if name in vars(kind)), None)
        wanted = _leading(method)
        if host is None:
            found = f"have no {name}"
        elif _leading(host)[: len(wanted)] != wanted:
            found = f"have {name}({', '.join(_leading(host))}), and {name}({', '.join(wanted)}) is needed"
        else:
            continue
        versions = {peer: installed(peer) for peer in ("trl", "transformers")}
        install = " ".join(f"{peer}=={PEERS[peer].nearest(version)}" for peer, version in versions.items())
        raise SeamError(
            f"{trainer.__name__}: trl {versions['trl']} and transformers {versions['transformers']} {found}. Install versions "
            f"that were run (pip install {install})."
        )


def _leading(method: Any) -> list[str]:
    """Return the names of a method's first arguments, up to `*args`."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [one.name for one in takewhile(lambda one: one.kind is one.POSITIONAL_OR_KEYWORD, parameters)]


class MismatchGRPOTrainer(MismatchTrainerMixin, GRPOTrainer):
    """Drop-in `GRPOTrainer` that takes a `MismatchGRPOConfig`."""


class MismatchRLOOTrainer(MismatchTrainerMixin, RLOOTrainer):  # type: ignore[misc]  # TRL's two trainers differ in their types
    """Drop-in `RLOOTrainer` that takes a `MismatchRLOOConfig`: precision, routing, lr and monitor."""
