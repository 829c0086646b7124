"""Tell to first order which of many changes of a model explain an error, by a few backward passes instead of a forward each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from mismatch_ext.adapters.transformers.doctor import Scorer
from torch import Tensor, nn

from mismatch_ext.doctor.noise import Noise
from mismatch_ext.doctor.sample import Floats
from mismatch_ext.doctor.table import LogitTable

# Number of random sign vectors by which the size of a change's prediction is estimated.
PROBES = 6
# Errors are clipped at so many units of rounding, because larger ones are not of first order.
FAR = 3.0
# Log-likelihood, in nats, that a change must promise to be tried, and the most changes that are tried.
LEAST_NATS, MOST_TRIED = 10.0, 12


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstOrder:
    r"""How much of the error changes of a model promise to explain, by :math:`\delta_c \approx \nabla \log p \cdot c`.

    With whitened errors u and predictions v, a change raises the log-likelihood by about :math:`(u \cdot v)^2 / 2 |v|^2`. The
    product takes one backward pass; the size of v is estimated by random signs, with one pass each.

    Args:
        scorer: The scorer of the sample.
        weights: Factors of the tokens' log-probabilities in each sum `[1 + P, N]`: the errors in the first row, then signs.
    """

    scorer: Scorer
    weights: Floats

    @classmethod
    def of(cls, scorer: Scorer, seed: int = 0) -> FirstOrder:
        """Compute the weights from the responses that fit."""
        sample, scores = scorer.sample, scorer.scores
        table = LogitTable.of(sample, scores.logits, scores.temperature)
        noise = Noise.of(scores.own - table.logprob, table.spread)
        unit = noise.weight * noise.scale
        errors = np.clip((sample.engine - table.logprob) / unit, -FAR, FAR)
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (PROBES, len(errors)))
        return cls(scorer=scorer, weights=np.stack([errors, *signs]) / unit * sample.fits)

    def of_tensors(self, changes: Mapping[str, Tensor]) -> list[str]:
        """Return the parameters whose changes promise most, best first.

        Args:
            changes: The change of each parameter, by its name.
        """
        own = dict(self.scorer.model.named_parameters())
        names = [name for name in changes if name in own]
        sums = np.zeros((len(names), len(self.weights)))
        for weighted in self.scorer.weighted(self.weights):
            for probe, total in enumerate(weighted):
                grads = torch.autograd.grad(total, [own[name] for name in names], retain_graph=True, allow_unused=True)
                for at, (name, grad) in enumerate(zip(names, grads, strict=True)):
                    sums[at, probe] += 0.0 if grad is None else float((grad * changes[name]).sum())
        return [names[at] for at in _promising(sums)]

    def of_swaps(self, experts: Mapping[int, nn.Module]) -> list[tuple[int, int, int]]:
        """Return the pairs of experts whose exchange promises most, as layer and two experts, best first.

        Args:
            experts: By layer, the module of its experts. It has weights of three dimensions, and is called with hidden states,
                indices of the chosen experts, and their gate weights.
        """
        seen: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

        def keeper(layer: int) -> object:
            def keep(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
                states, index, chosen = given
                seen[layer] = (states, index, chosen, output)

            return keep

        hooks = [module.register_forward_hook(keeper(layer)) for layer, module in experts.items()]  # type: ignore[arg-type]
        sums: dict[int, Tensor] = {}
        try:
            for weighted in self.scorer.weighted(self.weights):
                layers = sorted(seen)
                grads = [
                    torch.autograd.grad(total, [seen[layer][3] for layer in layers], retain_graph=True)
                    for total in weighted
                ]
                with torch.no_grad():
                    for at, layer in enumerate(layers):
                        found = _exchanged(experts[layer], *seen[layer][:3], torch.stack([g[at] for g in grads]))
                        sums[layer] = sums.get(layer, torch.zeros(())) + found
                seen.clear()
        finally:
            for hook in hooks:
                hook.remove()
        pairs = [(layer, a, b) for layer, found in sorted(sums.items()) for a in range(len(found)) for b in range(a)]
        both = np.stack([(sums[layer][a, b] + sums[layer][b, a]).numpy() for layer, a, b in pairs])
        return [pairs[at] for at in _promising(both)]


def _exchanged(experts: nn.Module, states: Tensor, index: Tensor, chosen: Tensor, grads: Tensor) -> Tensor:
    """Return how the sums change if expert b computes the tokens of expert a, for all pairs `[E, E, 1 + P]`."""
    # The module itself computes all tokens with one expert at a time, so that its activation need not be known.
    count = next(p.shape[0] for p in experts.parameters() if p.dim() == 3)
    states, grads = states.reshape(-1, states.shape[-1]), grads.reshape(len(grads), -1, grads.shape[-1])
    one = torch.ones(len(states), 1, dtype=chosen.dtype, device=states.device)
    answers = [experts(states, torch.full_like(one, e, dtype=torch.int64), one) for e in range(count)]
    along = torch.stack([(grads * answer).sum(-1) for answer in answers], -1)
    mine = torch.zeros(len(states), count, device=states.device).scatter(
        1, index.reshape(len(states), -1), chosen.reshape(len(states), -1)
    )
    # The sum over tokens s, which have weight w_sa for expert a, of w_sa (g . E_b - g . E_a).
    crossed = torch.einsum("sa,psb->abp", mine, along)
    return (crossed - crossed.diagonal().mT[:, None]).double().cpu()


def _promising(sums: Floats) -> list[int]:
    size = np.maximum((sums[:, 1:] ** 2).mean(1), 1e-300)
    gains = np.where(sums[:, 0] > 0, sums[:, 0] ** 2 / size / 2, 0.0)
    return [int(at) for at in np.argsort(-gains)[:MOST_TRIED] if gains[at] >= LEAST_NATS]
