"""The trainer's side of a training loop that the user wrote: a model, its optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.transformers import routing
from mismatch_ext.adapters.transformers.attention import DroppedCap, dropped_cap
from mismatch_ext.adapters.transformers.checkpoint import checkpoint_parameters
from mismatch_ext.adapters.transformers.head import head_of, in_float32, keep_in_float32, read_head
from mismatch_ext.adapters.transformers.reading import read_trainer
from mismatch_ext.adapters.transformers.scoring import MOST_LOGITS, Autocast, evaluating, logits_width
from mismatch_ext.adapters.transformers.vocabulary import VocabularySurplus, plain_vocabulary, surplus_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.audit import TrainerReading
from mismatch_ext.precision.dtypes import torch_dtype
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.rollout import Batch
from mismatch_ext.weights import draw_probes, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Logits = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Maps a model, tokens and attention mask `[B, S]` to logits `[B, S, V]`."""


def causal_logits(model: nn.Module, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the logits of a causal language model of transformers for right-padded tokens."""
    logits: Tensor = model(input_ids=tokens, attention_mask=attention_mask.long(), use_cache=False).logits
    return logits


class TrainedModel:
    """`TrainerSide` of a model that the user's own loop trains.

    Args:
        model: A causal language model of transformers, or any module if `logits` is given.
        optimizer: The optimizer of its parameters.
        scheduler: The schedule of the learning rate; `run.step` steps it.
        tokenizer: The model's tokenizer. With it, probes have no special tokens, and a warning tells if the model's vocabulary
            is larger than the tokenizer's.
        reference: The reference policy of the `kl` section.
        logits: Computes the logits of model and reference, if they are not models of transformers.
        autocast: Returns the context of forward passes; a `precision` section replaces it.

    Attributes:
        scaler: The loss scaler of float16; None if there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: nn.Module | None = None,
        logits: Logits = causal_logits,
        autocast: Autocast = nullcontext,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.tokenizer, self.reference = tokenizer, reference
        self.autocast, self._logits = autocast, logits
        self.scaler: LossScaler | None = None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @property
    def name(self) -> str:
        """The model's name, for the header of the run."""
        return str(getattr(getattr(self.model, "config", None), "_name_or_path", "") or type(self.model).__name__)

    @property
    def family(self) -> str:
        """The model's architecture, as its configuration names it; "" if it names none."""
        return str(getattr(getattr(self.model, "config", None), "model_type", ""))

    def compute_in(self, dtype: str, scaler: LossScaler | None) -> None:
        """Run forward passes in a dtype, under autocast unless it is float32.

        Args:
            dtype: "float32", "float16" or "bfloat16".
            scaler: Scales the loss; None for dtypes that need no loss scaling.
        """
        half = None if dtype == "float32" else torch_dtype(dtype)
        self.autocast = nullcontext if half is None else partial(torch.autocast, self.device.type, half)
        self.scaler = scaler

    def keep_head_in_float32(self) -> None:
        """Let the output heads of model and reference multiply in float32 from now on, outside of autocast.

        Raises:
            ConfigError: A head is not a linear layer of transformers.
        """
        for model in (self._plain, self.reference):
            if model is not None:
                keep_in_float32(model)

    def score_by_head(self, tokens: Tensor, *, exact: bool) -> Tensor:
        """Return log-probabilities as `score` does, with a head in float32 if `exact`, else with a plain one."""
        with in_float32(head_of(self._plain), exact=exact):
            return self.score(tokens)

    @property
    def _plain(self) -> nn.Module:
        """The model within DDP."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def reading(self) -> TrainerReading:
        """Return the dtypes, also of the output head, and the scaler that the model computes with, read back from them."""
        reading = read_trainer(self.model, self.autocast, self.scaler, self.device)
        return replace(reading, head_dtype=read_head(self._plain, self.autocast))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the present weights."""
        return self.model.named_parameters()

    def checkpoint_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the present weights under the names and in the shapes of the model's checkpoint, as engines load them."""
        from transformers import PreTrainedModel

        return checkpoint_parameters(self.model) if isinstance(self.model, PreTrainedModel) else self.named_parameters()

    def fingerprint(self) -> str:
        """Return a digest of the present weights."""
        return fingerprint(self.named_parameters())

    def score(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities `[N, T-1]`, float64, at temperature 1, of tokens `[N, T]` after the first."""
        width = logits_width(self.model)
        chunk = 1 if width is None else max(1, MOST_LOGITS // (tokens.shape[1] * width))
        with torch.no_grad(), evaluating(self.model):
            rows = [self._logprobs(self.model, part, torch.ones_like(part), 1.0) for part in tokens.split(chunk)]
        return torch.cat(rows).double().cpu()

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return log-probabilities of a batch's responses `[B, T]`, in nats at its temperature; 0 at padding.

        Args:
            batch: The rollouts.
            reference: Whether to use the reference policy, without gradients.

        Raises:
            ConfigError: There is no reference.
        """
        with torch.no_grad() if reference else nullcontext():
            model = self.policy(reference=reference)
            logprobs = self._logprobs(model, batch.tokens, batch.attention_mask, batch.temperature)
        return batch.of_responses(logprobs)

    def logits(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return the logits `[B, T, V]` that a batch's response tokens are drawn from, before the temperature."""
        with torch.no_grad() if reference else nullcontext(), self.autocast():
            logits = self._logits(self.policy(reference=reference), batch.tokens, batch.attention_mask)
        places = torch.arange(batch.response_mask.shape[1], device=logits.device) + batch.prompt_lengths[:, None] - 1
        places = places.clamp(max=logits.shape[1] - 1)[..., None].expand(-1, -1, logits.shape[2])
        return logits.gather(1, places)

    def policy(self, *, reference: bool = False) -> nn.Module:
        """Return the model, or the reference policy's.

        Raises:
            ConfigError: There is no reference.
        """
        if reference and self.reference is None:
            raise ConfigError("a reference policy is asked for, and there is none: TrainedModel(..., reference=model).")
        return self.reference if reference and self.reference is not None else self.model

    def _logprobs(self, model: nn.Module, tokens: Tensor, attention_mask: Tensor, temperature: float) -> Tensor:
        with self.autocast():
            logits = self._logits(model, tokens, attention_mask)[:, :-1].float()
        scaled = logits if temperature == 1 else logits / temperature
        return scaled.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def vocabulary(self) -> Tensor:
        """Return the token ids `[V]` that probes may be made of."""
        if self.tokenizer is not None:
            return plain_vocabulary(self.tokenizer, self.device)
        width = logits_width(self.model)
        if width is None:
            token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            with torch.no_grad(), evaluating(self.model):
                width = self._logits(self.model, token, torch.ones_like(token)).shape[-1]
        return torch.arange(width, device=self.device)

    def surplus(self) -> VocabularySurplus | None:
        """Return how much larger the model's vocabulary is than its tokenizer's; None if it is not larger, or not known."""
        if self.tokenizer is None:
            return None
        tokens = self.vocabulary()[None, :64]
        with torch.no_grad(), evaluating(self.model), self.autocast():
            logits = self._logits(self.model, tokens, torch.ones_like(tokens))
        return surplus_of(logits, len(self.tokenizer))

    def dropped_attention(self) -> DroppedCap | None:
        """Return what the model's attention leaves out of the model, measured on probe tokens; None if nothing."""
        return dropped_cap(self._plain, lambda: self.score(draw_probes(self.vocabulary())))

    @property
    def routing(self) -> Any:
        """The module with the functions that record and replay routing in the model."""
        return routing
