"""Runs of the real TRL that are killed, by SIGKILL, at a moment that the test has chosen, and go on from where they stood."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers.modeling_utils as modeling
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from transformers import TrainerCallback, TrainerState

from tests.peers.death import Death, plain
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, keep_names, rows


def block(mode: str) -> dict[str, Any]:
    """Return a block in which every section that has a state has one that moves in each step."""
    return {
        "routing": {"mode": mode, "measured": 0.5},
        "kl": {"coef": 0.05, "target_kl": 1e-3},
        # Any gradient norm above the first is a surge, so that detector, multiplier and counters move.
        "lr": {
            "trigger": "grad_norm",
            "decay": 0.9,
            "baseline_window": 1,
            "surge_ratio": 1.0001,
        },
        "monitor": {"alarms": {"reward": {"above": 1e-9, "patience": 4}}},
    }


def leg(
    model: str,
    out: str,
    mode: str,
    steps: int = 10,
    kill: dict[str, Any] | None = None,
    resume: bool = False,
    changed: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """Train to the end, or die on the way.

    Args:
        model: The checkpoint to begin with.
        out: The output folder, the same for all legs of a run.
        mode: Of replay.
        steps: Optimizer steps of the whole run.
        kill: When to die: `where`, after how many times (`count`) or seconds, and which part of the write is done (`part`).
        resume: Whether to go on, by `resume_from_checkpoint=True`.
        changed: Sections of the block that are other than in `block`.
        **rest: Trainer arguments.
    """
    if resume:
        delete_torn(Path(out))
    armed = Armed(resume)
    trainer = trainer_of(model, out, block(mode) | (changed or {}), armed, steps, **rest)
    if kill is not None:
        plant(trainer, armed, **kill)
    trainer.train(resume_from_checkpoint=resume or None)
    return state_of(trainer)


def trainer_of(
    model: str, out: str, block: dict[str, Any], armed: Armed, steps: int, **rest: Any
) -> MismatchGRPOTrainer:
    """Build a trainer that saves a checkpoint after each step; arguments as for `leg`."""
    given = {
        "use_vllm": False, "bf16": False, "max_completion_length": 8, "max_steps": steps, "save_strategy": "steps",
        "save_steps": 1, "save_total_limit": 2, "model_init_kwargs": {"dtype": "float32", "experts_implementation": "eager"},
        **rest,
    }  # fmt: skip
    trainer = MismatchGRPOTrainer(
        model=model,
        reward_funcs=graded,
        args=MismatchGRPOConfig(**arguments(out, mismatch=block, **given)),
        train_dataset=rows(10),  # one epoch: TRL draws the order of the first one again when a run is resumed
        callbacks=[armed],
    )
    keep_names(trainer)
    return trainer


def delete_torn(out: Path) -> None:
    """Delete checkpoints that were not finished, which transformers leaves to its user: this file is written last."""
    for folder in out.glob("checkpoint-*"):
        try:
            json.loads((folder / "trainer_state.json").read_text())
        except (OSError, ValueError):
            shutil.rmtree(folder)


def state_of(trainer: MismatchGRPOTrainer) -> dict[str, Any]:
    """Return digests of all that a run ends with."""
    return {
        "parameters": digest_of(trainer.model),
        "optimizer": _digest(trainer.optimizer.state_dict()),
        "schedule": _digest(trainer.lr_scheduler.state_dict()),
        "step": trainer.state.global_step,
    }


class Armed(TrainerCallback):
    """Lets nothing kill a run before its first checkpoint is whole: there would be nothing to go on from."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.moments: Callable[[str], None] = lambda name: None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is whole."""
        self.on = True
        self.moments("saved")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between two steps."""
        self.moments("step begins")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between two steps."""
        self.moments("step ends")


def plant(trainer: MismatchGRPOTrainer, armed: Armed, where: str, count: float, part: float = 0.5) -> None:
    """Let this process die at a moment."""
    death = Death(count, part, lambda: armed.on)
    if where == "time":
        begin = trainer._inner_training_loop

        def begun(*args: Any, **kwargs: Any) -> Any:
            death.plant(where)
            return begin(*args, **kwargs)

        trainer._inner_training_loop = begun
    elif death.plant(where):
        pass
    elif where in ("step begins", "step ends", "saved"):
        armed.moments = lambda name: death.die() if name == where and death.due() else None
    elif where == "generation":
        trainer.model.get_input_embeddings().register_forward_hook(lambda *_: death.die() if death.due() else None)
    elif where == "weights":
        save_weights = modeling.safe_save_file

        def save_weights_torn(tensors: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            save_weights(tensors, file, *args, **kwargs)
            if death.due():
                death.torn(file, Path(file).read_bytes())

        modeling.safe_save_file = save_weights_torn
    elif where == "trainer_state.json":
        to_json = TrainerState.save_to_json

        def to_json_torn(state: TrainerState, path: str) -> None:
            to_json(state, path)
            if death.due():
                death.torn(path, Path(path).read_bytes())

        TrainerState.save_to_json = to_json_torn  # type: ignore[method-assign]
    elif where == "rotation":
        remove = shutil.rmtree

        def remove_some(path: Any, *args: Any, **kwargs: Any) -> None:
            if "checkpoint-" in str(path) and death.due():
                files = sorted(Path(path).iterdir())
                for file in files[: int(part * len(files))]:
                    file.unlink()
                death.die()
            remove(path, *args, **kwargs)

        shutil.rmtree = remove_some  # type: ignore[assignment]
    else:
        raise ValueError(f"where={where!r}")


def _digest(state: Any) -> str:
    return hashlib.sha256(repr(plain(state)).encode()).hexdigest()
