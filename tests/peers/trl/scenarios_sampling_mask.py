"""Runs of the real TRL and vLLM with a `sampling_mask` section."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.rows import row_keys, rows_of_batch
from mismatch_ext.adapters.trl.sampling_mask import MaskedPass
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from mismatch_ext.errors import ReplayError
from mismatch_ext.sampling_mask import TokenSupport
from tests.peers.trl.scenarios_by_hand import halves
from tests.peers.trl.scenarios_by_hand_engine import one_engine
from tests.peers.trl.scenarios_training import arguments, graded, history, rows

SETTINGS: dict[str, dict[str, float]] = {
    "top_p": {"top_p": 0.9, "top_k": 0, "min_p": 0.0},
    "top_k": {"top_p": 1.0, "top_k": 8, "min_p": 0.0},
    "min_p": {"top_p": 1.0, "top_k": 0, "min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 8, "min_p": 0.05},
}
BLOCK = {"precision": {"dtype": "float32"}, "sampling_mask": {"max_support": 1000}}


class NextSettings(TrainerCallback):
    """Lets the engine sample with other settings in each step: what is left then is what its answers say."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set those of the step."""
        for name, value in list(SETTINGS.values())[state.global_step].items():
            setattr(self.trainer.vllm_generation, name, value)


class Measured(MismatchGRPOTrainer):
    """Compares each batch, over its masks and over the vocabulary, with the engine's, and gradients with those of dense masks."""

    sizes: list[float]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"].bool()
        engine, supports = output["sampling_per_token_logps"][mask], self._supports(output)
        replayed = self.mm.score_again(output)[mask]
        with overridden(self.mm.scoring, masking=None):
            plain = self.mm.score_again(output)[mask]
        # The pass that TRL takes, and one of our own, are the engine's over the masks, and are not over the whole vocabulary.
        for found in (replayed, output["old_per_token_logps"][mask]):
            assert float((found - engine).abs().mean()) < 1e-5
        assert 0.02 < float((plain - engine).abs().mean()) < 0.5
        assert self._gradient_error(output) < 1e-5
        sizes = torch.cat([support.counts for support in supports]).double()
        assert sizes.min() >= 1 and (not self.vllm_generation.top_k or sizes.max() <= 8)
        self.sizes.append(float(sizes.mean()))
        return output

    def _supports(self, output: Any) -> list[TokenSupport]:
        """Return the mask of each row of the batch that was just made."""
        known = self.mm.scoring.tables.newest(training=self.model.training)[0].supports
        return [known[key] for key in row_keys(*rows_of_batch(output))]

    def _gradient_error(self, output: Any) -> float:
        """Return how far the gradient through TRL's fused head is from that of dense masks, relative to its length."""
        tokens, real, length = rows_of_batch(output)
        ids, mask = output["completion_ids"], output["completion_mask"]
        logits = self.model(input_ids=tokens, attention_mask=real).logits[:, -length - 1 : -1] / self.temperature
        dense = torch.zeros_like(logits, dtype=torch.bool)
        for row, support in enumerate(self._supports(output)):
            for place in range(len(support)):
                dense[row, place, support.slice(place, place + 1).ids.long()] = True
        dense |= ~dense.any(-1, keepdim=True)
        theirs = logits.masked_fill(~dense, -math.inf).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        ours, _, _ = self._get_per_token_logps_and_entropies(self.model, tokens, real, length)
        a, b = (self._gradient((one * mask).sum() / mask.sum()) for one in (ours, theirs))
        return float((a - b).norm() / b.norm())

    def _gradient(self, value: Tensor) -> Tensor:
        found = torch.autograd.grad(value, [p for p in self.model.parameters() if p.requires_grad])
        return torch.cat([one.flatten().double() for one in found])


def settings(model: str, out: str) -> None:
    """Sample with each kind of truncation, a step each."""
    callback = NextSettings()
    given = {"max_steps": len(SETTINGS), "beta": 0.1, "bf16": False, **SETTINGS["top_p"]}
    args = MismatchGRPOConfig(**arguments(out, mismatch=BLOCK, **given))
    Measured.sizes = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*every ratio is too")
        trainer = Measured(model=model, reward_funcs=graded, args=args, train_dataset=rows(), callbacks=[callback])
        callback.trainer = trainer
        trainer.train()
    # The gap that is logged, corrected and watched is that over the masks.
    for entry, size in zip(history(trainer), trainer.sizes, strict=True):
        assert entry["mismatch/logp_abs_diff_mean"] < 1e-5 and entry["mismatch/support_truncated"] == 0.0
        assert entry["mismatch/sampling_mask_size"] == pytest.approx(size)
    # The reference is scored over the same tokens: equal models have a KL of 0, and others another.
    first, *later = (entry["kl"] for entry in trainer.state.log_history if "kl" in entry)
    assert first == pytest.approx(0.0, abs=1e-9) and min(later) > 1e-3
    assert {"trl/fused_head", "vllm/top_logprobs"} <= {patch["name"] for patch in trainer.mm.patches}


class Parts:
    """As users write it: scores all rows to log something, and computes TRL's loss of two halves, the second one first."""

    far: list[float]  # how far the ratio to the old policy is from 1 in each half

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        trainer: Any = super()
        self.scores = trainer._get_per_token_logps_and_entropies(*args, **options)
        return self.scores

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        trainer, loss = super(), torch.zeros(())
        own: Any = trainer._compute_loss  # type: ignore[misc]
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(model, *rows_of_batch(inputs))
        for part in reversed(halves(inputs)):
            loss = loss + own(model, part) / 2
            mask = part["completion_mask"].bool()
            self.far.append(float((self.scores[0].detach() - part["old_per_token_logps"])[mask].abs().max()))
        return loss


class PartsOfTrl(Parts, GRPOTrainer):
    """A user's trainer."""


class PartsInside(MismatchTrainerMixin, PartsOfTrl):
    """The same, with ours before it."""


class PartsOutside(Parts, MismatchGRPOTrainer):
    """The same, with ours after it."""


class Overlong(PartsOfTrl):
    """A user's trainer that makes a completion padding after it was scored."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["completion_mask"][0] = 0
        return output


class Filtered(MismatchTrainerMixin, Overlong):
    """The same, with ours before it."""


class Chunks(MismatchGRPOTrainer):
    """Scores the old policy by some rows at a time, and the reference in one pass."""

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, *args: Any, **options: Any) -> Any:
        score = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled() or model is not self.model:
            return score(model, ids, mask, *args, **options)
        parts = [score(model, ids[i : i + 3], mask[i : i + 3], *args, **options)[0] for i in range(0, len(ids), 3)]
        return torch.cat(parts), None, None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"].bool()
        for name in ("sampling_per_token_logps", "ref_per_token_logps"):
            self.far.append(float((output["old_per_token_logps"] - output[name])[mask].abs().max()))
        return output


class OtherTokens(MismatchGRPOTrainer):
    """Gives TRL's loss other prompts, beside a pass over the rows as they were sampled."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        own = self._get_per_token_logps_and_entropies(model, *rows_of_batch(inputs))[0].sum()
        prompts = torch.full_like(inputs["prompt_ids"], 9)
        return super()._compute_loss(model, {**inputs, "prompt_ids": prompts}) + 0 * own


class OtherModel(MismatchGRPOTrainer):
    """Lets a copy of the model score the rows of its loss."""

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            model = copy.deepcopy(self.accelerator.unwrap_model(model))
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)


def parts(model: str, out: str) -> None:
    """Train a step by trainers whose passes are over parts of a batch, over other tokens, or of another model."""
    with one_engine():
        for kind in (PartsOutside, PartsInside, Filtered, Chunks, OtherTokens, OtherModel):
            given = arguments(f"{out}/{kind.__name__}", max_steps=1, bf16=False, **SETTINGS["all"])
            given |= {"beta": 0.1, "mismatch": {**BLOCK, "kl": {}}} if kind is Chunks else {"mismatch": BLOCK}
            args = MismatchGRPOConfig(**given)
            trainer: Any = kind(model=model, reward_funcs=graded, args=args, train_dataset=rows())
            trainer.far = []
            if kind in (OtherTokens, OtherModel):
                words = "mismatch.sampling_mask, but the loss was computed without a replayed forward pass"
                with pytest.raises(ReplayError, match=words):
                    trainer.train()
            else:
                trainer.train()
                # On the policy that sampled, each ratio is 1; over the whole vocabulary it is up to 0.3 nats off.
                assert len(trainer.far) == 2 and max(trainer.far) < 1e-5, (kind, trainer.far)


def orders() -> None:
    """Score a batch as TRL's fused head comes to it: by all positions, as on a CPU, or by those that count, in chunks of rows."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, width, length = 11, 6, 4
    prompts, completions = ((1,), (2, 3), (4, 5), (6,)), ((3, 4, 5), (0, 1, 2, 3), (5, 6), (7, 8, 9))
    tokens, real = torch.zeros(4, width, dtype=torch.int64), torch.zeros(4, width, dtype=torch.int64)
    supports = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = width - length - len(prompt), width - length + len(completion)
        tokens[row, start:end], real[row, start:end] = torch.tensor([*prompt, *completion]), 1
        left = [sorted({one, 1, one % 5 + 2}) for one in completion]
        supports.append(TokenSupport.from_lists(left, vocabulary))
    real[2, -length:] = 0  # as mask_truncated_completions does
    hidden = torch.randn(4, width - 1, 8, generator=generator)
    weight = torch.randn(vocabulary, 8, generator=generator)
    counts = real[:, 1:].bool()
    counts[:, : width - 1 - length] = False
    labels, scaling = tokens[:, 1:], {"temperature": 0.7}
    logits = (hidden @ weight.T / 0.7).double()
    for row, support in enumerate(supports):
        for place in range(len(completions[row])):
            at = width - 1 - length + place
            kept = support.slice(place, place + 1).ids.long()
            logits[row, at] = torch.full_like(logits[row, at], -math.inf).index_put((kept,), logits[row, at, kept])
    dense = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    for size, compact in ((1, True), (3, True), (3, False), (4, False)):
        score = MaskedPass(supports, tokens, real, length)
        for _ in range(2):  # a pass that scores twice, as where R2 records before the reference is scored
            for first in range(0, 4, size):
                part, where = slice(first, first + size), counts[first : first + size]
                h, y = (one[part][where] if compact else one[part].flatten(0, 1) for one in (hidden, labels))
                scored = score(h, weight, None, y, **scaling)
                if scored is not None:
                    found = scored if compact else scored.view(where.shape)[where]
                    torch.testing.assert_close(found.double(), dense[part][where], atol=1e-5, rtol=0)
        assert score.done == 2
    # The row without a completion first, and as many tokens in the others as a row has places.
    some = [2, 0, 3]
    longer, known = (torch.nn.functional.pad(one[some], (1, 0)) for one in (tokens, real))
    score = MaskedPass([supports[row] for row in some], longer, known, length)
    there = counts[some]
    scored = score(hidden[some][there], weight, None, labels[some][there], **scaling)
    assert scored is not None and score.done == 1 and int(there.sum()) == longer.shape[1] - 1
    torch.testing.assert_close(scored.double(), dense[some][there], atol=1e-5, rtol=0)
    with pytest.raises(ReplayError, match="fused head is given 5 tokens that are not those which come next"):
        MaskedPass(supports, tokens, real, length)(hidden[0], weight, None, labels[0].roll(1), **scaling)
