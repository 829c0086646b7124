"""Stock trainers on two ranks with an engine each, alone and with `attach`; run as `scenarios_ranks` is."""

from __future__ import annotations

from typing import Any

from mismatch_ext.adapters.trl import attach
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.log_reading import read_run
from tests.peers.trl.scenarios_attach import FLOAT32, eager
from tests.peers.trl.scenarios_ranks import main, outcome, series
from tests.peers.trl.scenarios_training import arguments, graded, rows


class LogsAlone(TrainerCallback):
    """Logs before each step, on the main process alone; after it, transformers would take that for the step's own log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log."""
        if state.is_world_process_zero:
            self._trainer.log({"mine": 1.0})


def spoil_on_one_rank(trainer: Any) -> None:
    """Let the second batch of one rank miss a log-probability, which TRL takes for NaN and gives the weight 1."""
    generate, calls = trainer.vllm_generation.generate, []

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        calls.append(1)
        if len(calls) == 2 and trainer.accelerator.process_index == 1:
            result[2][3][0][0] = None
        return result

    trainer.vllm_generation.generate = spoiled


def attached(model: str, out: str) -> None:
    """Train alone, measured, and measured with a NaN on one rank and a log on the other."""
    found: dict[str, Any] = {}
    for name in ("stock", "measured", "nan"):
        args = GRPOConfig(**arguments(f"{out}/{name}", max_steps=2, **FLOAT32))
        with eager():
            trainer = GRPOTrainer(model=model, reward_funcs=graded, args=args, train_dataset=rows())
        if name == "nan":
            spoil_on_one_rank(trainer)
            trainer.add_callback(LogsAlone(trainer))
        measured = None if name == "stock" else attach(trainer)
        found[name] = outcome(trainer)
        if measured is not None:
            assert measured.verdict is not None and measured.verdict.status == "in_sync"
            if trainer.accelerator.is_main_process:
                assert not any(event.name == "check_failed" for event in read_run(measured.log.run_dir).events)
    stock, measured, nan = found.values()
    assert measured["parameters"] == stock["parameters"]
    for name in stock["logged"][0]:
        assert series(measured, name) == series(stock, name)
    assert 0 < max(series(measured, "mismatch/logp_abs_diff_mean")) < 0.01
    # Of the batch with a NaN all other rows are measured, and neither rank waits.
    (whole, both), (same, fewer) = (series(run, "mismatch/tokens") for run in (measured, nan))
    assert same == whole and both / 2 < fewer < both
    assert nan["logged"][1]["mismatch/bad_rows/rollout_logprobs"] == 1.0


if __name__ == "__main__":
    main(globals())
