"""Runs of the real TRL and vLLM with a `sampling_mask` section."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import trl.trainer.utils
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin, sampling_mask
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.rows import RowTable, find_in, row_key, row_keys, rows_of_batch
from mismatch_ext.adapters.trl.sampling_mask import MaskedPass
from mismatch_ext.patches.trl.fused_head import scoring_with
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


def completion_logits(model: Any, tokens: Tensor, attention_mask: Tensor, length: int) -> Tensor:
    """Return the logits that predict the last `length` tokens of each row `[B, T, V]`."""
    logits: Tensor = model(input_ids=tokens, attention_mask=attention_mask, logits_to_keep=length + 1).logits
    return logits[:, :-1]


class NextSettings(TrainerCallback):
    """Lets the engine sample with other settings in each step: what is left then is what its answers say."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set those of the step."""
        for name, value in list(SETTINGS.values())[state.global_step].items():
            setattr(self.trainer.vllm_generation, name, value)


class Measured(MismatchGRPOTrainer):
    """Measures each batch over its masks and over the vocabulary, and compares gradients with those of dense masks."""

    found: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"].bool()
        engine, supports = output["sampling_per_token_logps"][mask], self._supports(output)
        replayed = self.mm.score_again(output)[mask]
        with overridden(self.mm.scoring, masking=None):
            plain = self.mm.score_again(output)[mask]
        sizes = torch.cat([support.counts for support in supports]).double()
        self.found.append(
            {
                "replayed": float((replayed - engine).abs().mean()),
                "plain": float((plain - engine).abs().mean()),
                "ratio": float((plain - engine).exp().mean()),
                "old": float((output["old_per_token_logps"][mask] - engine).abs().mean()),
                "reference": float((output["ref_per_token_logps"][mask] - replayed).abs().mean()),
                "size": [float(sizes.min()), float(sizes.mean()), float(sizes.max())],
                "gradient": self._gradient_error(output),
            }
        )
        return output

    def _supports(self, output: Any) -> list[TokenSupport]:
        """Return the mask of each row of the batch that was just made."""
        known = self.mm.scoring.tables.newest(training=self.model.training)[0].supports
        return [known[key] for key in row_keys(*rows_of_batch(output))]

    def _gradient_error(self, output: Any) -> float:
        """Return how far the gradient through TRL's fused head is from that of dense masks, relative to its length."""
        tokens = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        real = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        ids, mask = output["completion_ids"], output["completion_mask"]
        logits = completion_logits(self.model, tokens, real, ids.size(1)) / self.temperature
        dense = torch.zeros_like(logits, dtype=torch.bool)
        for row, support in enumerate(self._supports(output)):
            for place in range(len(support)):
                dense[row, place, support.slice(place, place + 1).ids.long()] = True
        dense |= ~dense.any(-1, keepdim=True)
        theirs = logits.masked_fill(~dense, -math.inf).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        ours, _, _ = self._get_per_token_logps_and_entropies(self.model, tokens, real, ids.size(1))
        a, b = (self._gradient((one * mask).sum() / mask.sum()) for one in (ours, theirs))
        return float((a - b).norm() / b.norm())

    def _gradient(self, value: Tensor) -> Tensor:
        found = torch.autograd.grad(value, [p for p in self.model.parameters() if p.requires_grad])
        return torch.cat([one.flatten().double() for one in found])


def kept_and_listed(trainer: Any) -> dict[str, Any]:
    """Sample the same twice: masks of numbers that the engine kept, and of the objects that vLLM makes."""
    generation, checked, found = trainer.vllm_generation, trainer.mm.checked, {}
    prompts = [row["prompt"] for row in rows()][:4]
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    generation.generation_kwargs = {"seed": 3}
    checked.send_moved()
    for name in ("kept", "listed"):
        records: list[Any] = []
        hidden = overridden(sampling_mask, top_logprobs=lambda: ()) if name == "listed" else nullcontext()
        with hidden, checked.keeping(records), engine.captured_outputs(generation.llm) as outputs:
            result = generation.generate(ids, None, 1)
        found[name] = {
            "records": [
                [one.response_ids.tolist(), one.rollout_logprobs.tolist(), one.support.ids.tolist()] for one in records
            ],
            "offsets": [one.support.offsets.tolist() for one in records],
            "result": result,
            "objects": sum(len(top) for one in outputs for top in one.outputs[0].logprobs),
            "tokens": sum(len(one.outputs[0].token_ids) for one in outputs),
        }
    return found


def settings(model: str, out: str) -> dict[str, Any]:
    """Sample with each kind of truncation, a step each, and one more with none of them replayed in the reference."""
    callback = NextSettings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Measured.found = []
        trainer = Measured(
            model=model,
            reward_funcs=graded,
            args=MismatchGRPOConfig(
                **arguments(out, mismatch=BLOCK, max_steps=len(SETTINGS), beta=0.1, bf16=False, **SETTINGS["top_p"])
            ),
            train_dataset=rows(),
            callbacks=[callback],
        )
        callback.trainer = trainer
        trainer.train()
    return {
        "found": dict(zip(SETTINGS, trainer.found, strict=True)),
        "history": history(trainer),
        "kl": [entry["kl"] for entry in trainer.state.log_history if "kl" in entry],
        "warned": [str(one.message) for one in caught if "every ratio is too" in str(one.message)],
        "patches": [patch["name"] for patch in trainer.mm.patches],
        "engine": kept_and_listed(trainer),
    }


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


def parts(model: str, out: str) -> dict[str, Any]:
    """Train a step by trainers whose passes are over parts of a batch, or over other tokens."""
    found: dict[str, Any] = {}
    with one_engine():
        for kind in (PartsOutside, PartsInside, Filtered, Chunks, OtherTokens):
            name = kind.__name__
            given = arguments(f"{out}/{name}", max_steps=1, bf16=False, **SETTINGS["all"])
            given |= {"beta": 0.1, "mismatch": {**BLOCK, "kl": {}}} if issubclass(kind, Chunks) else {"mismatch": BLOCK}
            trainer: Any = kind(
                model=model, reward_funcs=graded, args=MismatchGRPOConfig(**given), train_dataset=rows()
            )
            trainer.far = []
            try:
                trainer.train()
                found[name] = trainer.far
            except ReplayError as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def heads() -> dict[str, Any]:
    """Put a score in place of TRL's fused head, with and without TRL's entropies, and count the runs of TRL's own."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(11, 8, generator=generator)
    given = (hidden, weight, None, torch.arange(6), 0.7, 4, None, 1.0, ("log_probs", "entropy"))
    ours, own = torch.full((6,), -3.0), trl.trainer.utils._ChunkedLogProbFunction
    plain, found, runs = own.forward, dict[str, Any](), list[int]()

    def counted(*args: Any) -> Any:
        runs.extend([1] if args[1].shape == hidden.shape else [])  # the patch tries TRL's own on two rows
        return plain(*args)

    with overridden(own, forward=staticmethod(counted)):
        for name, entropies, scored in (("entropies", True, ours), ("alone", False, ours), ("TRL's", False, None)):
            runs.clear()
            with scoring_with(lambda *_, score=scored, **__: score, entropies=entropies):
                outputs = trl.trainer.utils._ChunkedLogProbFunction.apply(*given)
            found[name] = [None if one is None else one.tolist() for one in outputs], len(runs)
    return {**found, "stock": [None if one is None else one.tolist() for one in own.apply(*given)]}


def orders() -> dict[str, Any]:
    """Score a batch as TRL's fused head comes to it: by all positions or by those that count, in chunks of rows."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, width, length = 11, 6, 4
    prompts, completions = ((1,), (2, 3), (4, 5), (6,)), ((3, 4, 5), (0, 1, 2, 3), (5, 6), (7, 8, 9))
    tokens, real = torch.zeros(4, width, dtype=torch.int64), torch.zeros(4, width, dtype=torch.int64)
    supports, sampled = [], []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = width - length - len(prompt), width - length + len(completion)
        tokens[row, start:end], real[row, start:end] = torch.tensor([*prompt, *completion]), 1
        left = [sorted({one, 1, one % 5 + 2}) for one in completion]
        sampled.append(row_key(prompt, completion))
        supports.append(TokenSupport.from_lists(left, vocabulary))
    real[2, -length:] = 0  # as mask_truncated_completions does
    hidden = torch.randn(4, width - 1, 8, generator=generator)
    weight = torch.randn(vocabulary, 8, generator=generator)
    counts = real[:, 1:].bool()
    counts[:, : width - 1 - length] = False
    labels, scaling = tokens[:, 1:], {"temperature": 0.7}
    keys, other = row_keys(tokens, real, length), row_keys(tokens + 1, real, length)
    table, reverse = RowTable(), RowTable()
    table.add(sampled, supports=supports)
    reverse.add(sampled[::-1], supports=supports[::-1])
    found: dict[str, Any] = {
        "found": [find_in([one.supports], keys) == supports for one in (table, reverse)],
        "some": find_in([table.supports], keys[3:0:-2]) == supports[3:0:-2],
        "other": find_in([table.supports], other) == [None] * 4,
    }
    for size in (1, 3, 4):
        for compact in (False, True):
            score = MaskedPass(supports, tokens, real, length)
            for repeat in range(2):  # a pass that scores twice, as where R2 records before the reference is scored
                parts = []
                for first in range(0, 4, size):
                    part, where = slice(first, first + size), counts[first : first + size]
                    given = (hidden[part], labels[part])
                    h, y = (one[where] if compact else one.flatten(0, 1) for one in given)
                    scored = score(h, weight, None, y, **scaling)
                    whole = torch.zeros(where.shape)
                    if scored is not None:
                        whole[where] = scored if compact else scored.view(where.shape)[where]
                    parts.append(whole)
                found[f"{size} {compact} {repeat}"] = torch.cat(parts).tolist()
            found[f"{size} {compact} done"] = score.done
    try:
        MaskedPass(supports, tokens, real, length)(hidden[0], weight, None, labels[0].roll(1), **scaling)
    except ReplayError as error:
        found["refused"] = str(error)
    logits = (hidden @ weight.T / 0.7).double()
    for row, support in enumerate(supports):
        for place in range(len(completions[row])):
            at = width - 1 - length + place
            kept = support.slice(place, place + 1).ids.long()
            logits[row, at] = torch.full_like(logits[row, at], -math.inf).index_put((kept,), logits[row, at, kept])
    dense = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    found["dense"] = torch.where(counts, dense, 0.0).tolist()
    # The row without a completion first, and as many tokens in the others as a row has places.
    some = [2, 0, 3]
    longer, known = (torch.nn.functional.pad(one[some], (1, 0)) for one in (tokens, real))
    score = MaskedPass([supports[row] for row in some], longer, known, length)
    there = counts[some]
    scored = score(hidden[some][there], weight, None, labels[some][there], **scaling)
    found["packed"] = {
        "tokens": int(there.sum()), "places": longer.shape[1] - 1, "done": score.done,
        "scored": [] if scored is None else scored.tolist(), "dense": dense[some][there].tolist(),
    }  # fmt: skip
    return found
