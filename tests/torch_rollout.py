"""A small engine and small models for loops of one's own: real, in torch alone, and done in milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mismatch_ext.adapters.transformers import routing
from mismatch_ext.adapters.transformers.side import Logits, causal_logits
from torch import Tensor, nn

from mismatch_ext.centering import TokenHead
from mismatch_ext.config import MismatchConfig
from mismatch_ext.precision.audit import EngineReading, SyncReading
from mismatch_ext.rollout import Batch, RolloutRecord, SamplingSettings, collate, routes_of, to_provenance
from mismatch_ext.routing import RoutingShape
from mismatch_ext.weights import Decoded, NamedTensors, TensorComparison

VOCABULARY = 12


class Recurrent(nn.Module):
    """A language model that is no transformer, and not of transformers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, 16)
            self.cells = nn.GRU(16, 16, batch_first=True)
            self.head = nn.Linear(16, VOCABULARY)
            nn.init.normal_(self.head.weight, std=0.7)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, S, V]`."""
        logits: Tensor = self.head(self.cells(self.embed(tokens))[0])
        return logits


def recurrent_logits(model: nn.Module, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Return what a `Recurrent` makes of right-padded tokens."""
    logits: Tensor = model(tokens)
    return logits


class TorchRollout:
    """An engine: a copy of the model, which samples token by token and gets the weights that are sent to it.

    Args:
        model: What to copy.
        logits: How it is called.
        noise: Added to the logits that it samples by and reports, as another kernel's rounding is.
        dtype: What it says that it computes in.
    """

    patches: Sequence[Mapping[str, Any]] = ()
    longest: int | None = None

    def __init__(
        self,
        model: nn.Module,
        logits: Logits = causal_logits,
        *,
        n: int = 4,
        max_new_tokens: int = 6,
        noise: float = 0.0,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.sampling, self.weight_version = SamplingSettings(), 0
        self.drops_updates = False
        self._logits, self._n, self._tokens, self._noise = logits, n, max_new_tokens, noise
        self._dtype = dtype
        self._random = torch.Generator().manual_seed(seed)
        self._shape: RoutingShape | None = None
        self._top_k = 0

    def check(self, block: MismatchConfig, trainer_dtype: str) -> None:
        """Fit every block."""

    def reading(self) -> EngineReading:
        """Return what it computes with."""
        return EngineReading(
            engine="torch",
            version=torch.__version__,
            model_dtype=self._dtype,
            parameter_dtypes={self._dtype: sum(p.numel() for p in self.model.parameters())},
            kv_cache_dtype="auto",
            logprobs_mode="processed_logprobs",
            quantization=None,
        )

    def record_routing(self, shape: RoutingShape) -> None:
        """Record the routes of rollouts."""
        self._shape = shape

    def record_heads(self, top_k: int) -> None:
        """Report the most likely tokens with each rollout."""
        self._top_k = min(top_k, VOCABULARY)

    @torch.no_grad()
    def _logprobs(self, tokens: Tensor, *, noisy: bool = False) -> Tensor:
        logits = self._logits(self.model, tokens, torch.ones_like(tokens))
        if noisy:
            logits = logits + self._noise * torch.randn(logits.shape, generator=self._random)
        return logits.float().log_softmax(-1)

    def score(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities `[N, T-1]`."""
        return self._logprobs(tokens)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1).double()

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample tokens after prompts, with random numbers of their own."""
        random, scores = torch.Generator().manual_seed(0), []
        for _ in range(count):
            now = self._logprobs(tokens)[:, -1]
            drawn = torch.multinomial(now.exp(), 1, generator=random)
            tokens = torch.cat([tokens, drawn], 1)
            scores.append(now.gather(1, drawn))
        return Decoded(tokens=tokens, logprobs=torch.cat(scores, 1).double())

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare nothing."""
        return ()

    def _head(self, heads: Sequence[Any]) -> TokenHead | None:
        if not self._top_k:
            return None
        logprobs, ids = (torch.stack(column) for column in zip(*heads, strict=True))
        return TokenHead(ids=ids.int(), logprobs=logprobs)

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[RolloutRecord]:
        """Sample responses; token 0 ends one."""
        provenance = to_provenance(self.reading(), sampling=self.sampling, weight_version=self.weight_version)
        records = []
        for prompt in prompts:
            for _ in range(self._n):
                ids, scores, heads = [*prompt], [], []
                while len(scores) < self._tokens and (not scores or ids[-1]):
                    now = self._logprobs(torch.tensor([ids]), noisy=True)[0, -1]
                    ids.append(int(torch.multinomial(now.exp(), 1, generator=self._random)))
                    scores.append(float(now[ids[-1]]))
                    heads.append(now.topk(self._top_k))
                record = {"response_ids": tuple(ids[len(prompt) :]), "rollout_logprobs": tuple(scores)}
                records.append(
                    RolloutRecord(
                        prompt_ids=tuple(prompt),
                        response_mask=(True,) * len(scores),
                        finish_reason="stop" if ids[-1] == 0 else "length",
                        provenance=provenance,
                        head=self._head(heads),
                        **record,
                    )
                )
        return records if self._shape is None else self._routed(records)

    def _routed(self, records: list[RolloutRecord]) -> list[RolloutRecord]:
        import dataclasses

        batch: Batch = collate(records, torch.device("cpu"))
        with torch.no_grad(), routing.record_routing(self.model, version=self.weight_version) as recording:
            self._logits(self.model, batch.tokens, batch.attention_mask)
        traces = routes_of(recording.passes, batch)
        return [dataclasses.replace(r, routing=trace) for r, trace in zip(records, traces, strict=True)]

    @torch.no_grad()
    def update(self, weights: NamedTensors) -> tuple[SyncReading, Mapping[str, Any]]:
        """Take new weights, by the names of the model's own parameters or of its checkpoint."""
        self.weight_version += 1
        sent = {name: tensor.detach().clone() for name, tensor in weights}
        if not self.drops_updates:
            self.take(sent)
        return SyncReading(sent_dtype="float32", received_dtype=self._dtype), {}

    def take(self, sent: Mapping[str, Tensor]) -> None:
        """Copy tensors into the model."""
        own = dict(self.model.named_parameters())
        for name, tensor in sent.items():
            if name in own:
                own[name].copy_(tensor)
