"""Runs of TRL's other online trainers with the block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mismatch_ext.adapters.trl import (
    MismatchConfigMixin,
    MismatchGRPOConfig,
    MismatchRLOOConfig,
    MismatchRLOOTrainer,
    MismatchTrainerMixin,
)
from trl import RLOOConfig, RLOOTrainer

from tests.oracle import watch_float32_error
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

LOGGED = ("loss", "grad_norm", "reward", "learning_rate", "completions/mean_length")


def options(out: str, **overrides: Any) -> dict[str, Any]:
    """Return the arguments that RLOOConfig has too."""
    given = arguments(out, **{"beta": 0.05, "bf16": False, "num_iterations": 1, **overrides})
    return {k: v for k, v in given.items() if not k.startswith("vllm_importance")}


def outcome(trainer: Any) -> dict[str, Any]:
    """Train, and return what tests compare."""
    float32 = not (trainer.args.bf16 or trainer.args.fp16) and trainer.use_vllm
    errors = watch_float32_error(trainer) if float32 else []
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "history": [{k: v for k, v in entry.items() if k in LOGGED or k.startswith("mismatch/")} for entry in logs],
        "parameters": digest_of(trainer.model),
        "float32_errors": errors,
    }


def rloo(model: str, out: str, block: Any = None, **overrides: Any) -> dict[str, Any]:
    """Train RLOO with a block, or stock."""
    given = options(out, **overrides)
    if block is None:
        return outcome(RLOOTrainer(model=model, reward_funcs=graded, args=RLOOConfig(**given), train_dataset=rows()))
    config = MismatchRLOOConfig(**given, mismatch=block)
    return outcome(MismatchRLOOTrainer(model=model, reward_funcs=graded, args=config, train_dataset=rows()))


def gmpo(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train GMPO, an experimental trainer that derives from GRPOTrainer, with a block."""
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    @dataclass
    class Config(MismatchConfigMixin, GMPOConfig):
        _VALID_DICT_FIELDS = MismatchGRPOConfig._VALID_DICT_FIELDS

        def _follow_objective(self, block: Any) -> None:
            """Leave it to the trainer to refuse."""

    class Trainer(MismatchTrainerMixin, GMPOTrainer):
        pass

    config = Config(**arguments(out, **{"bf16": False, **overrides}), mismatch=block)
    return outcome(Trainer(model=model, reward_funcs=graded, args=config, train_dataset=rows()))
