"""One of two ranks samples by itself, as a callback that shows a sample does; run as `scenarios_ranks` is."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tests.peers.trl.scenarios_attach import FLOAT32, eager
from tests.peers.trl.scenarios_ranks import build, main, outcome

BLOCKS: dict[str, Any] = {
    "stock": None,
    "measured": {},
    "sections": {
        "lr": {},
        "kl": {"coef": 0.05},
        "correction": {"preset": "decoupled_token_is"},
    },
}


class SamplesAlone(TrainerCallback):
    """Samples after each step, on the main process alone."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.samples: list[Any] = []
        self.versions: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sample, and note how many updates the engine has had."""
        if state.is_world_process_zero:
            _, completions, logprobs, _ = self._trainer.vllm_generation.generate([[5, 6, 7]] * 2, None, 1)
            self.samples.append([completions, logprobs])
        if getattr(self._trainer, "mm", None) is not None:
            self.versions.append(self._trainer.mm.checked.weight_version)


def sampled(model: str, out: str) -> dict[str, Any]:
    """Train stock, with a config that only measures, and with sections, while one rank samples after each step."""
    found: dict[str, Any] = {}
    for name, block in BLOCKS.items():
        with eager():
            trainer = build(model, f"{out}/{name}", block, use_vllm=True, max_steps=2, **FLOAT32)
        callback = SamplesAlone(trainer)
        trainer.add_callback(callback)
        found[name] = outcome(trainer, samples=callback.samples, versions=callback.versions)
    return found


if __name__ == "__main__":
    main(globals())
