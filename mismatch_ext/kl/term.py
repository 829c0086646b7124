"""The KL term of a run: its coefficient for each batch, its part of the loss and of the rewards, and its measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl.controller import KlController
from mismatch_ext.kl.estimators import kl_estimate
from mismatch_ext.kl.full import kl_full_surrogate
from mismatch_ext.kl.penalty import kl_penalty
from mismatch_ext.kl.surrogate import kl_baseline, kl_surrogate
from mismatch_ext.ranks import ONE_PROCESS, Ranks

Logits = Callable[[], tuple[Tensor, Tensor]]


def ragged_bias(config: KlConfig | None, setting: str, instead: str) -> str | None:
    """Return the warning about a term in a loss that averages over the tokens of each response; None without such a term.

    Such a mean weighs the tokens of short responses more, so that the expected gradient is not that of the KL, at any size of the
    batch (docs/kl.md).

    Args:
        config: The `kl` section.
        setting: The host's setting that asks for such a loss, with its value.
        instead: The host's setting to use instead.
    """
    if config is None or not config.in_loss:
        return None
    return (
        f"mismatch.kl with {setting}: the loss averages over the tokens of each response, so that the KL of short responses "
        "counts more. Enumerated on a toy policy, 27 to 32 % of the gradient is lost at any batch size (docs/kl.md). Use "
        f"{instead}."
    )


class KlTerm:
    """The KL term that the `kl` section adds to a trainer's loss or subtracts from its rewards.

    For each batch, call in this order: `begin`; `penalty`, if the KL is in the rewards; `adapt_to`, once the batch is scored;
    `loss`, for each micro-batch. Policies: the current policy pi, the old policy (pi when the batch was sampled), the rollout
    policy mu, the reference. Tensors are log-probabilities of the sampled tokens `[B, T]`, nats, and masks that are 1 where the
    policy sampled.

    Args:
        config: The `kl` section.
        coef: First coefficient.

    Raises:
        ConfigError: The coefficient is not a positive number, or lies outside the controller's bounds.
    """

    def __init__(self, config: KlConfig, coef: float) -> None:
        self.config = config
        self.controller = KlController(coef, config.target_kl)
        self._coef_of_batch: float | None = None
        self._collected: list[tuple[float, float]] = []

    @property
    def coef(self) -> float:
        """Coefficient of the present batch, for loss and rewards; the controller's update takes effect with the next batch."""
        return self.controller.coef if self._coef_of_batch is None else self._coef_of_batch

    @property
    def adaptive(self) -> bool:
        """Whether the coefficient follows a target."""
        return self.config.target_kl is not None

    def reset(self) -> None:
        """Go back to the first coefficient, for a training that starts again."""
        self.controller = KlController(self.controller.initial, self.config.target_kl)
        self._collected = []
        self.begin()

    def follow(self, coef: float) -> None:
        """Take the coefficient that the trainer has now, which a callback may change between steps; 0 is no term.

        Args:
            coef: The trainer's own coefficient.

        Raises:
            ConfigError: It was changed although a controller leads the coefficient.
        """
        if not self.adaptive:
            self.controller.state = replace(self.controller.state, coef=coef)
        elif coef != self.controller.initial:
            raise ConfigError(
                f"mismatch.kl.target_kl, and the trainer's coefficient was changed from {self.controller.initial:g} to "
                f"{coef:g}: the controller leads it. Remove target_kl, or what changes the coefficient."
            )

    def begin(self) -> None:
        """Start a batch with the controller's present coefficient."""
        self._coef_of_batch = None

    def adapt_to(self, sums: Sequence[float], *, steer: bool = True) -> dict[str, float]:
        """Fix the coefficient of a fresh batch, and let the controller choose the next batch's from its KL.

        Args:
            sums: What `sums` returns, added up over the batch's parts.
            steer: Whether the controller learns from the batch; not if the policy does not.
        """
        self._coef_of_batch = self.controller.coef
        found, tokens = self._means(sums)
        if tokens and steer:
            self.controller.update(found["kl_ref_k1"])
        return found

    @staticmethod
    def sums(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return, for a part of a batch, the sums of k1 and of k3 over its tokens and the number of these tokens `[3]`.

        Args:
            logprobs: Log-probabilities under the policy that is measured `[B, T]`.
            ref_logprobs: Log-probabilities under the reference `[B, T]`.
            mask: 1 at the policy's tokens `[B, T]`.
        """
        chosen = mask.bool()
        policy, reference = logprobs[chosen], ref_logprobs[chosen]
        sums = [kl_estimate(policy, reference, name).double().sum() for name in ("k1", "k3")]
        return torch.stack([*sums, chosen.sum().double()])

    def collect(self, sums: Sequence[float]) -> dict[str, float]:
        """Do as `adapt_to` for a part of a batch; `settle` updates the controller once, for all parts together."""
        self._coef_of_batch = self.controller.coef
        found, tokens = self._means(sums)
        self._collected.append((found["kl_ref_k1"], tokens))
        return found

    def settle(self) -> None:
        """Let the controller choose the next batch's coefficient, if parts of a batch were collected since the last `settle`."""
        collected, self._collected = self._collected, []
        tokens = sum(count for _, count in collected)
        if tokens:
            self.controller.update(sum(k1 * count for k1, count in collected) / tokens)

    def measure(
        self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ranks: Ranks = ONE_PROCESS
    ) -> dict[str, float]:
        """Return the term's metrics over the tokens of all ranks; the means are 0 if there are no tokens.

        Args:
            logprobs: Log-probabilities under the policy that is measured `[B, T]`.
            ref_logprobs: Log-probabilities under the reference `[B, T]`.
            mask: 1 at the policy's tokens `[B, T]`.
            ranks: The processes that each hold a part of the tokens; all of them must call this.

        Returns:
            `kl_ref_k1` and `kl_ref_k3`, the mean k1 and k3 per token, nats, and `kl_coef`.
        """
        return self._measure(logprobs, ref_logprobs, mask, ranks)[0]

    def _measure(
        self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ranks: Ranks
    ) -> tuple[dict[str, float], float]:
        return self._means(ranks.sum(self.sums(logprobs, ref_logprobs, mask)).tolist())

    def _means(self, sums: Sequence[float]) -> tuple[dict[str, float], float]:
        k1, k3, tokens = sums
        count = max(tokens, 1.0)
        return {"kl_ref_k1": k1 / count, "kl_ref_k3": k3 / count, "kl_coef": self.coef}, tokens

    def loss(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        *,
        rollout_logprobs: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        groups: Tensor | None = None,
        baseline: Tensor | None = None,
        logits: Logits | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the term `[B, T]`, coefficient included, that is added to the per-token loss to be minimised.

        The importance ratio is pi over the rollout policy if `rollout_logprobs` is given, otherwise pi over the old policy if
        `old_logprobs` is given, otherwise 1, as if the policy itself had sampled.

        Args:
            logprobs: Log-probabilities under the current policy `[B, T]`, with their graph.
            ref_logprobs: Log-probabilities under the reference `[B, T]`; not needed for the estimator `full`.
            mask: 1 at the policy's tokens `[B, T]`.
            rollout_logprobs: Log-probabilities from the engine that sampled `[B, T]`, if it reports them.
            old_logprobs: Log-probabilities under the old policy `[B, T]`.
            groups: The prompt of each row, an integer `[B]`, for a baseline over the rows given here.
            baseline: What `baseline` returned for these tokens `[B, T]`, if rows of a prompt are spread over several calls.
            logits: Computes the policy's and the reference's logits `[B, T, V]`, for the estimator `full`.
            temperature: Divides those logits.

        Raises:
            ConfigError: The estimator is `full`, and logits are missing or a baseline is given; or it is another one, and the
                reference is missing.
            RecordError: Shapes or dtypes do not fit.
            NonFiniteLogprobError: NaN or infinity at one of the policy's tokens.
        """
        config, chosen = self.config, mask.bool()
        given: dict[str, Any] = {"behavior_logprobs": self._behavior(logprobs, rollout_logprobs, old_logprobs)}
        given["coef"] = self.coef
        if config.estimator == "full":
            if logits is None or baseline is not None:
                raise ConfigError(
                    "mismatch.kl.estimator='full' needs the logits of policy and reference in one process, and computes its "
                    "baseline itself; use k1, k2, k3 or abs where a trainer has log-probabilities alone."
                )
            policy, reference = logits()
            return kl_full_surrogate(
                policy, reference, logprobs, chosen, config, groups=groups, temperature=temperature, **given
            )
        if ref_logprobs is None:
            raise ConfigError(
                f"mismatch.kl.estimator={config.estimator!r} needs log-probabilities under the reference; let the trainer "
                "score one, or leave out mismatch.kl."
            )
        if config.in_rewards:
            return kl_penalty(logprobs, ref_logprobs, chosen, config, **given).loss
        return kl_surrogate(logprobs, ref_logprobs, chosen, config, groups=groups, baseline=baseline, **given)

    def baseline(
        self,
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        mask: Tensor,
        groups: Tensor,
        rollout_logprobs: Tensor | None = None,
    ) -> Tensor:
        """Return the leave-one-out baseline of each token `[B, T]`, nats, from the policy at the start of the update.

        A response's baseline does not depend on that response. Subtracting it therefore keeps the expectation, also while the
        policy moves; see `kl_baseline`.

        Args:
            old_logprobs: Log-probabilities under the old policy `[B, T]`.
            ref_logprobs: Log-probabilities under the reference `[B, T]`.
            mask: 1 at the policy's tokens `[B, T]`.
            groups: The prompt of each row, an integer `[B]`.
            rollout_logprobs: Log-probabilities from the engine that sampled `[B, T]`, if it reports them.
        """
        behavior = self._behavior(old_logprobs, rollout_logprobs, old_logprobs)
        return kl_baseline(
            old_logprobs, ref_logprobs, mask.bool(), self.config, behavior_logprobs=behavior, groups=groups
        )

    def penalty(self, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return the part to subtract from each token's reward `[B, T]`, coefficient included, detached; see `kl_penalty`.

        Args:
            old_logprobs: Log-probabilities under the old policy `[B, T]`.
            ref_logprobs: Log-probabilities under the reference `[B, T]`.
            mask: 1 at the policy's tokens `[B, T]`.
        """
        return kl_penalty(old_logprobs, ref_logprobs, mask.bool(), self.config, coef=self.coef).reward

    def _behavior(self, logprobs: Tensor, rollout: Tensor | None, old: Tensor | None) -> Tensor | None:
        """Return log-probabilities under the policy that sampled, if a ratio needs them; otherwise None."""
        if self.config.ratio == "none":
            return None
        return next((given for given in (rollout, old) if given is not None), logprobs.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able data; call this between two batches."""
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go on from a saved state, and return a sentence for the user or None; see `KlController.load_state_dict`."""
        said = self.controller.load_state_dict(state)
        self._collected = []
        self.begin()
        return said
