"""TRL's own KL term and correction by exact enumeration: `python -m tests.peers.trl.scenarios_kl_terms terms '{json}'`.

It runs in any version of TRL, also one that is too old for the adapter: nothing of the adapter is imported.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
import trl
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.presets import PRESETS
from mismatch_ext.testing import moments, row_term
from tests.oracles.corrections import judged, judged_ours
from tests.oracles.kl.hosts import SAMPLINGS, Sampling, judge, problem_of

SETTINGS: tuple[dict[str, Any], ...] = (
    {"use_bias_correction_kl": True},
    {"use_bias_correction_kl": False},
    {"use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""Values of `vllm_importance_sampling_mode`."""


class Tabled(GRPOTrainer):
    """GRPOTrainer whose engine and scoring pass return given log-probabilities; correction and loss are TRL's own."""

    given: Tensor
    sampled: Tensor

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        given = self.given if torch.is_grad_enabled() else self.given.detach()
        return given, torch.zeros_like(given), None

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]]]:
        return torch.ones(self.sampled.shape, dtype=torch.long).tolist(), self.sampled.tolist()


def built(model: str, out: str, setting: dict[str, Any]) -> Tabled:
    """Build a trainer with TRL's defaults, the coefficient 1, and a setting."""
    given = {"beta": 1.0, **setting}
    config = GRPOConfig(output_dir=out, use_cpu=True, bf16=False, report_to="none", **given)
    data = Dataset.from_list([{"prompt": "1+1="}] * 8)
    trainer = Tabled(model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
                     train_dataset=data)  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def enumerated(trainer: Tabled, sampling: Sampling) -> Any:
    """Return the exact moments of a trainer's loss, each response a batch; advantages of 0 leave the KL term alone."""

    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        length = logprobs.size(1)
        one, ones = torch.ones(1, 1, dtype=torch.long), torch.ones(1, length, dtype=torch.long)
        trainer.given = logprobs
        inputs = {
            "prompt_ids": one, "prompt_mask": one, "completion_ids": ones, "completion_mask": ones,
            "advantages": torch.zeros(1, dtype=torch.float64), "ref_per_token_logps": ref_logprobs,
            "num_items_in_batch": torch.tensor(length),
        }  # fmt: skip
        if sampling == "off-policy":
            inputs["old_per_token_logps"] = behavior_logprobs
        # TRL's default loss is the mean over tokens.
        return trainer._compute_loss(trainer.model, inputs) * length

    return moments(problem_of(sampling), row_term(loss))


def terms(model: str, out: str) -> list[dict[str, Any]]:
    """Measure TRL's KL term under its default, for which nothing is set, and under other settings."""
    found = []
    for setting in SETTINGS:
        default = all(GRPOConfig.__dataclass_fields__[name].default == value for name, value in setting.items())
        trainer = built(model, out, {} if default else setting)
        names = ", ".join(f"{key}={value}" for key, value in setting.items())
        for sampling in SAMPLINGS:
            term = judge(
                enumerated(trainer, sampling), host="TRL", version=trl.__version__, setting=names, default=default,
                sampling=sampling,
            )  # fmt: skip
            found.append(dataclasses.asdict(term))
    return found


def corrections(model: str, out: str) -> dict[str, Any]:
    """Judge TRL's importance correction in each mode, beside ours, and its weights of whole responses without a bound."""
    trainer, found = built(model, out, {"beta": 0.0}), {}
    trainer.use_vllm, trainer.num_generations = True, 1  # set now, when no engine is started any more

    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor, reward: Tensor) -> Tensor:
        trainer.given, trainer.sampled = logprobs, behavior_logprobs
        inputs = trainer._generate_and_score_completions([{"prompt": "1+1="}])
        # Of one response, TRL's own advantage is 0.
        return trainer._compute_loss(trainer.model, {**inputs, "advantages": reward}) * logprobs.numel()

    for mode in MODES:
        trainer.vllm_importance_sampling_mode = mode
        found[mode] = {"theirs": judged(loss), "ours": judged_ours(PRESETS[mode])}
    trainer.vllm_importance_sampling_clip_max = 1e9
    return found | {"unbounded": judged(loss)}


if __name__ == "__main__":
    print("RESULT " + json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
