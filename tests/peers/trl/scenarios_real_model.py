"""TRL on a real vocabulary with a tied head, and chat prompts."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer

from mismatch_ext.weights import SyncVerdict, WeightVerifier
from tests.oracle import watch_float32_error
from tests.peers.trl.scenarios_training import arguments, history


def even(completions: list[Any], **_: Any) -> list[float]:
    """Return the share of characters with an even code, which varies between completions of any text."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(ord(character) % 2 == 0 for character in text) / max(len(text), 1) for text in texts]


def train(model: str, out: str, block: Any) -> dict[str, Any]:
    """Train three steps on chat prompts, and note what is found of each weight update."""
    prompts = [[{"role": "user", "content": f"What is {n} + {n + 1}? Answer with a number."}] for n in range(16)]
    verdicts: list[SyncVerdict] = []
    judge = WeightVerifier.judge

    def noting(self: WeightVerifier, *args: Any, **kwargs: Any) -> SyncVerdict:
        verdicts.append(judge(self, *args, **kwargs))
        return verdicts[-1]

    WeightVerifier.judge = noting  # type: ignore[method-assign]
    trainer = MismatchGRPOTrainer(
        model=model, reward_funcs=even, train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=MismatchGRPOConfig(**arguments(out, mismatch=block, vllm_max_model_length=128)),
    )  # fmt: skip
    errors = watch_float32_error(trainer)
    trainer.train()
    return {
        "history": history(trainer),
        "float32_errors": errors,
        "verdicts": [[verdict.status, verdict.movement, verdict.message] for verdict in verdicts],
    }
