"""Score centering in TRL (`correction.centering`): vLLM reports its most likely tokens, and TRL's loss gets the term.

TRL's loss of a token is -A w log p, weighed by its `loss_type`. The term is added with the same advantage and the same weight:

    loss + sum over tokens of weight * A * centering_terms

Its log-probabilities come from the hidden states that TRL's fused head gets in the pass whose loss is stepped. TRL's own terms
stay as they are. A row's head is found by the row's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.accelerate.sharded import is_sharded
from mismatch_ext.adapters.transformers.scoring import logits_width
from mismatch_ext.adapters.trl.aggregation import token_weights
from mismatch_ext.adapters.trl.rows import STEPS, Rows, RowTable, find_in, row_key, row_keys, rows_of_batch
from mismatch_ext.adapters.vllm.heads import expect_top_k
from mismatch_ext.patches.trl.fused_head import scoring_with
from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs, top_logprobs
from torch import Tensor

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.centering import SAMPLER_BIAS, TokenHead, TopTokens, padded_heads, projected_terms
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, RecordError, ReplayError
from mismatch_ext.patching import Patch
from mismatch_ext.presets import resolve
from mismatch_ext.rollout import RolloutRecord

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.run import TrlRun


class EngineHeads:
    """Takes the most likely tokens that vLLM reports, and leaves TRL those that were sampled.

    Args:
        top_k: How many.
        served: Whether a server reports them, whose answer lists them.
    """

    def __init__(self, top_k: int, *, served: bool = False) -> None:
        self.asked, self._served = top_k, served

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Patches that keep these tokens as numbers while the engine generates; none where each token has to be an object."""
        return () if self._served else top_logprobs()

    def of(
        self, result: tuple[Any, ...], outputs: Sequence[Any] | None, bad: BadRows
    ) -> tuple[list[TokenHead | None], tuple[Any, ...]]:
        """Return each completion's head, None for bad rows, and the result with the sampled tokens alone.

        Args:
            result: What TRL's wrapper returned.
            outputs: The engine's outputs, if they keep the tokens as arrays; None if TRL's result lists them.
            bad: Takes the rows whose most likely tokens are no distribution.

        Raises:
            RecordError: The engine reported none, they are not known, or all rows are bad.
        """
        prompts, completions, tops, ids = result
        if tops is None or ids is None:
            raise RecordError(
                "the engine returned no log-probabilities, of which score centering takes the most likely."
            )
        if outputs is None:
            heads = self._judged(
                [
                    partial(TokenHead.from_lists, names, values, self.asked)
                    for names, values in zip(ids, tops, strict=True)
                ],
                bad,
            )
            sampled = [
                [[top[of.index(token)]] for token, top, of in zip(tokens, values, names, strict=True)]
                for tokens, values, names in zip(completions, tops, ids, strict=True)
            ]
            return heads, (prompts, completions, sampled, [[[token] for token in tokens] for tokens in completions])
        # With tensor parallelism every rank has the outputs of all ranks, and TRL takes the rank's own.
        rows = [row for output in outputs for row in output.outputs]
        kept: dict[int, Any] = {
            id(row.token_ids): row.logprobs.left for row in rows if isinstance(row.logprobs, SampledLogprobs)
        }
        if any(id(tokens) not in kept for tokens in completions if tokens):
            raise RecordError(
                "a completion's tokens are not those of an output of LLM.generate: something stands between the engine and TRL, "
                "so that its most likely tokens are not known. Remove it, or mismatch.correction.centering."
            )
        taken = [kept[id(tokens)] if tokens else TopTokens() for tokens in completions]
        return self._judged([partial(tops_of_row.head, self.asked) for tops_of_row in taken], bad), result

    @staticmethod
    def _judged(makers: Sequence[Callable[[], TokenHead]], bad: BadRows) -> list[TokenHead | None]:
        """Return what the makers of each row's head return; None for bad rows."""
        heads: list[TokenHead | None] = []
        for row, make in enumerate(makers):
            head = None
            with bad.judging(row, "head"):
                head = make()
            heads.append(head)
        if bad.spoil_all and all(head is None for head in heads):
            raise RecordError(bad.faults[0].message)  # no fault of single rows
        return heads


class Centering:
    """The term of score centering in one trainer's loss.

    Args:
        run: The run of the trainer, whose scoring knows the rows.
        block: Its config.
    """

    def __init__(self, run: TrlRun, block: MismatchConfig) -> None:
        self.run, self.trainer = run, run.trainer
        settings = None if block.correction is None else resolve(block.correction)
        section = None if settings is None else settings.centering
        self.top_k: int | None = None
        self._only_measured = False
        self._bounds: dict[str, float | None] = {}
        if settings is not None and section is not None:
            self.top_k, self._only_measured = section.top_k, section.only_measured
            self._bounds = settings.bounds_of_tokens
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the biases that were measured since the last log."""
        self._biases = torch.zeros(2, dtype=torch.float64)  # sum and number of this rank's tokens

    def check(self, *, stitches: bool) -> None:
        """Refuse completions that are made of several generations, whose heads are not joined."""
        if self.top_k is not None and stitches:
            raise ConfigError(
                "mismatch.correction.centering with tools, an environment or a rollout_func: the engine's most likely tokens of "
                "several generations are not joined to one completion; leave out one of the two."
            )

    def of_engine(self) -> EngineHeads | None:
        """Return what takes the heads of the engine's answers; None without centering.

        Raises:
            ConfigError: The trainer's weights are sharded, or the model's vocabulary is not known.
            EngineError: The engine reports fewer tokens than are asked for; a server is asked when it is connected.
        """
        if self.top_k is None:
            return None
        if is_sharded(self.trainer.accelerator) or self.trainer.is_deepspeed_enabled:
            raise ConfigError(
                "mismatch.correction.centering with FSDP or DeepSpeed: the term is made of the output head in the backward pass, "
                "too, when its weights may be sharded again; train with DDP or one process, or leave out the key."
            )
        generation = self.trainer.vllm_generation
        if generation.mode == "colocate":
            return EngineHeads(expect_top_k(generation.llm, self.top_k))
        vocabulary = logits_width(self.trainer.accelerator.unwrap_model(self.trainer.model))
        if vocabulary is None:
            raise ConfigError(
                "mismatch.correction.centering with vllm_mode='server': the model's configuration has no vocab_size, so that it "
                "is not known how many tokens the server can report. Use vllm_mode='colocate', or leave out the key."
            )
        return EngineHeads(min(self.top_k, vocabulary), served=True)

    def keep(self, table: RowTable, records: Sequence[RolloutRecord]) -> None:
        """Keep the heads of a batch of rollouts in its table of rows; an evaluation's is not centered."""
        if self.top_k is None or not self.trainer.model.training:
            return
        for record in records:
            if record.head is not None:
                table.heads.setdefault(row_key(record.prompt_ids, record.response_ids), record.head)

    def added(
        self,
        compute: Callable[..., Tensor],
        host: Any,
        model: Any,
        inputs: Mapping[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute a loss, and add the term of its rows."""
        if self.top_k is None or not torch.is_grad_enabled():
            return compute(host, model, inputs, *args, **kwargs)
        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages[:, None]
        learns = advantages != 0  # a bad row does not
        rows = rows_of_batch(inputs)
        found = _HeadPass(rows, *self._heads_of(rows, learns.any(1).tolist()), self._bounds)
        with scoring_with(found, entropies=True):
            loss = compute(host, model, inputs, *args, **kwargs)
        if found.terms is None:
            raise ReplayError(
                f"mismatch.correction.centering: {type(self.trainer).__name__} computed its loss without a pass of TRL's fused "
                "head over the micro-batch's tokens. Remove what overrides _get_per_token_logps_and_entropies, or the key."
            )
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        # A bad row keeps its mask and its head, and may have no finite bias.
        measured = found.biases[mask & found.known & found.biases.isfinite()].double()
        self._biases += torch.stack([measured.sum(), measured.new_tensor(len(measured))]).cpu()
        if self._only_measured:
            return loss
        terms = found.terms.masked_fill(~(mask & learns), 0.0)
        weights = token_weights(self.trainer, inputs).to(terms.dtype) * self._slope()
        centered: Tensor = loss + (weights * advantages * terms).sum()
        return centered

    def metrics(self) -> dict[str, float]:
        """Return the mean `sampler_bias` of the tokens of all ranks since the last log; every rank must call it."""
        if self.top_k is None:
            return {}
        total, count = self.run.ranks.sum(self._biases.to(self.trainer.accelerator.device)).tolist()
        self.begin_anew()
        return {SAMPLER_BIAS: total / count} if count else {}

    def _slope(self) -> float:
        """Return what TRL's loss multiplies A log p by where the policy is the one that scored the batch."""
        if self.trainer.loss_type == "cispo":
            return min(1.0, float(self.trainer.epsilon_high))
        return 1.0

    def _heads_of(self, rows: Rows, learns: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Return the heads of the rows of a micro-batch, ids `[B, T, K]` and log-probabilities `[B, T, K]`.

        Raises RecordError if a row that is learned from has none.
        """
        tokens, _, length = rows
        keys = row_keys(*rows)
        tables = self.run.scoring.tables.newest(training=True)
        found = find_in((table.heads for table in tables), keys)
        for (_, completion), head, needed in zip(keys, found, learns, strict=True):
            if head is None and completion and needed:
                raise RecordError(
                    "mismatch.correction.centering: a row of the micro-batch has other tokens than every rollout of the last "
                    f"{STEPS} steps, so that the engine's distribution at its tokens is not known. Leave prompt_ids and "
                    "completion_ids as they were sampled, or remove the key."
                )
        return padded_heads(found, length, tokens.device)


class _HeadPass:
    """Computes the terms of one micro-batch from what TRL's fused head is given; TRL's own head then runs as it does."""

    def __init__(self, rows: Rows, head_ids: Tensor, head_logprobs: Tensor, bounds: Mapping[str, float | None]) -> None:
        tokens, attention_mask, length = rows
        self._wanted = attention_mask[:, -length:].bool()
        self._labels = tokens[:, 1:]
        scored = attention_mask[:, 1:].bool().clone()
        scored[:, : scored.shape[1] - length] = False
        self._scored = scored
        self._head_ids, self._head_logprobs, self._bounds = head_ids, head_logprobs, bounds
        self.terms: Tensor | None = None  # `[B, T]`
        self.known = head_logprobs.isfinite().any(-1)  # places of which the engine has told its distribution
        self.biases = torch.zeros(self._wanted.shape, device=tokens.device)

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **scaling: Any) -> None:
        """Take the hidden states of the micro-batch's tokens; those of other tokens are somebody's own pass."""
        if not torch.is_grad_enabled():
            return
        states = self._states(hidden, labels)
        if states is None:
            return
        wanted = self._wanted
        terms, biases = projected_terms(
            states,
            weight,
            bias,
            head_ids=self._head_ids[wanted],
            head_logprobs=self._head_logprobs[wanted],
            **scaling,
            upper=self._bounds["upper"],
            lower=self._bounds["lower"],
        )
        self.terms = terms.new_zeros(wanted.shape).masked_scatter(wanted, terms)
        self.biases = biases.new_zeros(wanted.shape).masked_scatter(wanted, biases.detach())

    def _states(self, hidden: Tensor, labels: Tensor) -> Tensor | None:
        """Return the hidden states of the wanted tokens, row after row; None if these are not the micro-batch's."""
        compact = self._labels[self._scored]
        if torch.equal(labels, compact):
            return hidden
        if len(labels) == self._labels.numel() and torch.equal(labels[self._scored.flatten()], compact):
            return hidden[self._scored.flatten()]
        return None
