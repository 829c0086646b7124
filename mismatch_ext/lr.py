"""Learning-rate control: lowers the rate when responses grow, on top of the host's own schedule (arXiv 2602.01826).

state, multiplier = lr_step(state, statistics, config, step=step)  # the rule, pure

control = LrControl(config, optimizer, warmup=2)  # the rule on an optimizer
for batch in rollouts:
    control.collect(length_statistics(length_sums(batch.lengths, batch.truncated)))
    ...  # loss, backward, clipping as usual
    with control.applied():
        optimizer.step()
    log(scheduler.get_last_lr()[0] * control.last_multiplier)
    scheduler.step()
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from mismatch_ext.config import LrConfig, Trigger, section_of
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.states import from_json, state, to_json
from mismatch_ext.sums import Sums, part

logger = logging.getLogger(__name__)

PERIOD_FACTOR = 1.8
"""Period over the step of the surge (arXiv 2602.01826)."""
LEAST: dict[Trigger, float] = {"response_length": 1.0, "mismatch_kl": 1e-3, "grad_norm": 0.0, "f_tau": 0.01}
"""Least value of a surge per trigger: 1e-3 nats of mismatch KL are NeMo RL's limit of a healthy run, the others are a choice."""
SMOOTHING = 5
"""Measurements in the median that is compared, no more than the baseline has; fewer than half of them out of line change nothing.
A choice: with batches of 8 responses or more no flat length fires, with 4 it does in about one of 20 runs of 1,000 batches."""
NOISE_MARGIN = 4.0
"""Robust standard deviations above the baseline that a surge has at least; a choice."""
TRUNCATED_RISE = 0.5
"""Rise of the fraction of truncated responses over its baseline that is a surge of lengths."""
MAD_TO_STD = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""
F_TAU = "f_1.1"
"""Metric that `trigger: f_tau` watches: F at threshold 1.1, because at 2 few tokens are in the tail."""

Statistics = Mapping[str, float | None]
"""Of one batch of rollouts over all ranks:

    response_length     mean tokens per response, truncated responses included
    truncated_fraction  fraction of the responses that were cut off at the length limit
    mismatch_kl         KL between rollout and trainer policy in nats per token, by an estimate that is never negative (k3)
    grad_norm           norm of the gradient before clipping
    f_tau               fraction of tokens whose probability ratio, or its inverse, exceeds 1.1
    responses           number of responses; 0 makes the batch no measurement
"""

# The rule: from state and statistics to state and multiplier.

_Count = Annotated[int, Field(ge=0)]
_NonNegative = Annotated[float, Field(ge=0)]


@state
class Measurement:
    """A batch's statistic that the trigger watches, with the fraction of its responses that were truncated, if known."""

    step: _Count
    value: _NonNegative
    truncated: _NonNegative | None = None


@state
class Baseline:
    """A baseline: median and robust standard deviation of the first measurements."""

    center: _NonNegative
    spread: _NonNegative


@state
class LrState:
    """State of the rule, without its settings."""

    trigger: Trigger
    step: Annotated[int, Field(ge=-1)] = -1
    """Last step that was asked for; before that, one less than the first step."""
    measured_step: _Count | None = None
    """Step of the last measurement."""
    surge_step: _Count | None = None
    history: tuple[Measurement, ...] = ()
    """Last measurements, oldest first."""
    baseline: Baseline | None = None
    """None until there are enough measurements."""
    truncated_baseline: Baseline | None = None


def lr_step(state: LrState, statistics: Statistics | None, config: LrConfig, *, step: int) -> tuple[LrState, float]:
    """Return state and multiplier of the optimizer step after `step` steps, by the rule of arXiv 2602.01826; raises RecordError.

        multiplier(t) = max(decay^floor(t / period), floor),   period = round(1.8 * T_surge) unless given

    t counts from the end of warm-up. The paper leaves open where; counted from the surge, the first decay would come after the
    collapse that it shows for a constant rate (surge at about 110, collapse at about 300). Until a surge that is needed is
    found, the multiplier is 1. `statistics` are of a new batch of rollouts, over all ranks, or None; the first ones of a step
    count.
    """
    if state.trigger != config.trigger:
        raise RecordError(
            f"the state of mismatch.lr is of trigger {state.trigger!r}, the section of {config.trigger!r}. Set "
            "mismatch.lr.trigger back, or take `lr` out of the checkpoint's state to begin anew."
        )
    if step < max(state.step, 0):
        raise RecordError(
            f"step {step} comes after step {state.step}; the weights went back to an earlier checkpoint but the state "
            "of learning-rate control did not. Load the state that was saved with the weights."
        )
    state = dataclasses.replace(state, step=step)
    if statistics is not None and statistics.get("responses") != 0:
        checked = {name: _checked(name, value, step) for name, value in statistics.items() if value is not None}
        if config.watches and config.trigger not in checked:
            raise RecordError(
                f"step {step}: {config.trigger} is missing, and mismatch.lr.trigger={config.trigger!r} needs it of every batch. "
                "Give it, or give None at a step without a new batch."
            )
        if config.watches and state.measured_step != step:
            measurement = Measurement(
                step=step, value=checked[config.trigger], truncated=checked.get("truncated_fraction")
            )
            state = _measured(dataclasses.replace(state, measured_step=step), measurement, config)
    return state, lr_multiplier(state, config)


def lr_period(state: LrState, config: LrConfig) -> int | None:
    """Return the steps per decay; None before the surge that decides them."""
    if config.period is not None or state.surge_step is None:
        return config.period
    return max(1, round(PERIOD_FACTOR * state.surge_step))


def lr_multiplier(state: LrState, config: LrConfig) -> float:
    """Return the multiplier of the state's step."""
    period = lr_period(state, config)
    if period is None:
        return 1.0
    return max(config.decay ** (max(state.step - (config.warmup_steps or 0), 0) // period), config.floor)


def lr_metrics(state: LrState, config: LrConfig) -> dict[str, float]:
    """Return the values to log; values that are not known yet are left out."""
    values = {
        "lr_multiplier": lr_multiplier(state, config),
        "lr_surges": float(state.surge_step is not None),
        "lr_surge_step": state.surge_step,
        "lr_period": lr_period(state, config),
        "lr_surge_threshold": None if state.baseline is None else surge_threshold(state.baseline, config),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def surge_threshold(baseline: Baseline, config: LrConfig) -> float:
    """Return the smoothed value from which on there is a surge over a baseline; 0 means that no value is one."""
    margin = NOISE_MARGIN * baseline.spread
    return max(config.surge_ratio * baseline.center, baseline.center + margin, LEAST[config.trigger])


def _measured(state: LrState, measurement: Measurement, config: LrConfig) -> LrState:
    """Remember a measurement, and look for the surge. The paper shows surges but gives no detector: all of this is a choice.

    The median of the last `SMOOTHING` measurements must reach the threshold over the median of the first ones, so that slow
    growth counts once it is large. With half of the responses at the limit, the mean cannot show growth: their share counts too.
    """
    if state.surge_step is not None:
        return state
    history = (*state.history, measurement)
    smoothing = min(SMOOTHING, config.baseline_window)
    if state.baseline is None:
        if len(history) < config.baseline_window:
            return dataclasses.replace(state, history=history)
        truncated = [m.truncated for m in history if m.truncated is not None]
        counts_truncated = config.trigger == "response_length" and truncated
        state = dataclasses.replace(
            state,
            baseline=_baseline_of([m.value for m in history]),
            truncated_baseline=_baseline_of(truncated) if counts_truncated else None,
        )
    history = history[-smoothing:]
    surge = _surge(state, history, config)
    return dataclasses.replace(state, history=history if surge is None else (), surge_step=surge)


def _surge(state: LrState, recent: tuple[Measurement, ...], config: LrConfig) -> int | None:
    """Return the step of the surge: of the first recent measurement that reaches the threshold, if their median does."""
    assert state.baseline is not None
    threshold = surge_threshold(state.baseline, config)
    if threshold > 0 and median(m.value for m in recent) >= threshold:
        return next(m.step for m in recent if m.value >= threshold)
    truncated = [(m.step, m.truncated) for m in recent if m.truncated is not None]
    if state.truncated_baseline is not None and len(truncated) == len(recent):
        center, spread = state.truncated_baseline.center, state.truncated_baseline.spread
        threshold = center + max(TRUNCATED_RISE, NOISE_MARGIN * spread)
        if median(fraction for _, fraction in truncated) >= threshold:
            return next(step for step, fraction in truncated if fraction >= threshold)
    return None


def _baseline_of(values: list[float]) -> Baseline:
    center = median(values)
    return Baseline(center=center, spread=MAD_TO_STD * median(abs(x - center) for x in values))


def _checked(name: str, value: float, step: int) -> float:
    most = 1.0 if name in ("truncated_fraction", "f_tau") else math.inf
    if math.isfinite(value) and 0 <= value <= most:
        return float(value)
    raise RecordError(
        f"step {step}: {name}={value!r} cannot lead the learning rate; allowed: a finite number >= 0, of a fraction 0 <= x <= 1. "
        "Give a k3 estimate as mismatch_kl, no grad_norm at a step that overflowed, and responses=0 for an empty batch."
    )


# The rule on optimizers.


@state
class SavedControl:
    """What a checkpoint holds of an `LrControl`."""

    control: LrState
    collected: tuple[tuple[float, dict[str, float]], ...] = ()
    grad_norm: float | None = None


class LrControl:
    """Multiplies the learning rate of torch optimizers during their step and nowhere else, by the rule of arXiv 2602.01826.

        multiplier(t) = max(decay^floor(t / period), floor),   period = round(1.8 * T_surge) unless given

    Outside `applied`, each `group["lr"]` is the schedule's own rate. So any scheduler works, even one that computes the next rate
    from the last one, and a checkpoint of optimizer and schedule equals that of a stock run. A step of a controlled optimizer
    outside `applied` raises ConfigError. The state is a function of the statistics, so that ranks which are given the same ones
    have the same multiplier to the last bit. A rate that a captured CUDA graph holds cannot be multiplied.

    Args:
        config: The `lr` section, or a mapping of its keys.
        *optimizers: Torch optimizers, or wrappers that hold one as `.optimizer`.
        warmup: Steps of warm-up that the schedule has.
        step: Optimizer steps taken before, if control joins a running training.
        updates: Returns the number of updates taken before, if the rule counts a host's updates of several optimizer steps. None
            counts each `applied` in which an optimizer took its step, and none that a loss scaler skipped.
        required: Advice for the user if a step has no new statistics although the section watches some; such a step is
            refused with this advice. None allows such steps.

    Attributes:
        state: The rule's state, of the last step.
        last_multiplier: Multiplier of the last `applied`; multiply the schedule's rate by it to log the rate that was applied.

    Raises:
        ConfigError: There is no torch optimizer inside `optimizers`.
    """

    def __init__(
        self,
        config: LrConfig | Mapping[str, Any],
        *optimizers: Any,
        warmup: int = 0,
        step: int = 0,
        updates: Callable[[], int] | None = None,
        required: str | None = None,
    ) -> None:
        config = section_of(LrConfig, config, "config", "trigger")
        if config.warmup_steps is None:
            config = dataclasses.replace(config, warmup_steps=warmup)
        self.config = config
        self._optimizers = [innermost(optimizer) for optimizer in optimizers]
        self._joined, self._updates, self._required = step, updates, required
        self._collected: list[tuple[float, dict[str, float]]] = []
        self._grad_norm: float | None = None
        self._informed_step: int | None = None
        self._applying = self._taken = False
        self._metrics: dict[str, float] = {}
        self._begin()
        self._hooks = [
            hook
            for optimizer in self._optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]

    def _begin(self) -> None:
        step = self._joined if self._updates is None else self._updates()
        self._set(LrState(trigger=self.config.trigger, step=step - 1), step)
        self.last_multiplier = self.multiplier

    def _set(self, state: LrState, step: int, statistics: Statistics | None = None) -> None:
        self.state, _ = lr_step(state, statistics, self.config, step=step)

    @property
    def multiplier(self) -> float:
        """Multiplier of the next step."""
        return lr_step(self.state, None, self.config, step=self._next_step())[1]

    def _next_step(self) -> int:
        return self.state.step if self._updates is None else self._updates()

    def collect(self, statistics: Statistics, weight: float = 1.0) -> None:
        """Add the statistics, over all ranks, of rollouts that the next step learns from.

        Those of several batches are averaged by `weight` times `responses`. A gradient norm that is not finite is ignored with
        its batch, because its step is skipped.
        """
        norm = statistics.get("grad_norm")
        if norm is None or math.isfinite(norm):
            self._collected.append((weight, {name: value for name, value in statistics.items() if value is not None}))

    def note_grad_norm(self, norm: float) -> None:
        """Note a step's gradient norm where it is known only afterwards; it leads a later step whose statistics have none."""
        self._grad_norm = norm if math.isfinite(norm) else self._grad_norm

    def lead(self) -> dict[str, float]:
        """Give the collected statistics to the rule, for the next step, and return the values to log; raises as `lr_step`."""
        collected, self._collected = self._collected, []
        counted = [(weight * (batch.get("responses") or 1.0), batch) for weight, batch in collected if weight]
        if not counted:
            return {}
        counted = [entry for entry in counted if entry[1].get("responses") != 0] or counted  # no measurement
        total = sum(weight for weight, _ in counted)
        # A statistic that some batch does not have, such as the truncated fraction, is left out of the average.
        names = set.intersection(*(set(batch) for _, batch in counted))
        means = {name: sum(weight * batch[name] for weight, batch in counted) / total for name in names}
        if self.config.trigger == "grad_norm" and "grad_norm" not in means:
            means |= {"responses": 0.0} if self._grad_norm is None else {"grad_norm": self._grad_norm}
        self._set(self.state, self._next_step(), means)
        self._informed_step = self.state.step
        return lr_metrics(self.state, self.config)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Multiply the rates while the optimizers step; what was collected since the last step leads this one.

        Raises ConfigError if nothing was collected although `required` is set; RecordError as `lr_step`.
        """
        if self._collected:
            self.lead()
        step = self._next_step()
        if self._required is not None and self.config.watches and self._informed_step != step:
            raise ConfigError(
                f"mismatch.lr.trigger={self.config.trigger!r}, but the trainer gave no statistics before this update, so no "
                f"surge could be found; {self._required}, or give mismatch.lr.period."
            )
        self._set(self.state, step)
        self.last_multiplier = lr_multiplier(self.state, self.config)
        self._metrics = lr_metrics(self.state, self.config)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        self._applying, self._taken = True, False
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * self.last_multiplier  # a new object, because groups may share a tensor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            self._applying = False
        if self._taken and self._updates is None:
            self._set(self.state, step + 1)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a step at the schedule's own rate, before it moves the weights."""
        # torch.distributed.checkpoint creates an optimizer's state by a step at rate 0, which moves nothing.
        if not self._applying and any(float(group["lr"]) != 0 for group in optimizer.param_groups):
            raise ConfigError(
                f"{type(optimizer).__name__} is stepped without mismatch.lr, which it is under; allowed: steps inside "
                "`LrControl.applied`. Step it there, or remove mismatch.lr."
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        if self._applying:
            # A fused optimizer's `step` is called on an overflow too, and skips the update itself.
            overflow = getattr(optimizer, "found_inf", None)
            self._taken |= overflow is None or not bool(overflow)

    def metrics(self) -> dict[str, float]:
        """Return the values to log of the last step, with the multiplier that it applied; empty before the first step."""
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the control's state and the collected statistics, as JSON-able data for a checkpoint."""
        self._set(self.state, self._next_step())
        return to_json(
            SavedControl(control=self.state, collected=tuple(self._collected), grad_norm=self._grad_norm),
        )

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint, once optimizer and schedule are loaded; None, if the checkpoint holds no state, warns."""
        if saved is None:
            self._collected, self._grad_norm, self._informed_step = [], None, None
            self._begin()
            if self.state.step:
                logger.warning(
                    "The checkpoint of step %d holds no state of mismatch.lr: the rate is controlled from here on, with "
                    "multiplier %g and a new baseline of the trigger.",
                    self.state.step,
                    self.multiplier,
                )
            return
        loaded = from_json(SavedControl, saved, "lr")
        step = loaded.control.step if self._updates is None else self._updates()
        self._set(loaded.control, max(step, 0))
        self.last_multiplier = self.multiplier
        self._collected, self._grad_norm = list(loaded.collected), loaded.grad_norm
        self._informed_step = None

    def close(self) -> None:
        """Let the optimizers step without control from here on."""
        for hook in self._hooks:
            hook.remove()


def innermost(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers that hold it as `.optimizer`; raises ConfigError if there is none."""
    inner = optimizer
    while getattr(inner, "optimizer", None) is not None:
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise ConfigError(
            f"mismatch.lr cannot control the optimizer of this trainer: found {type(inner).__name__} inside "
            f"{type(optimizer).__name__}, which is no torch.optim.Optimizer. Give the torch optimizer whose `step` changes the "
            "weights."
        )
    return inner


def warn_of_short_training(config: LrConfig, steps: int) -> None:
    """Warn if a training of so many steps is over before there can be a surge."""
    window = config.baseline_window
    if config.watches and 0 < steps <= window:
        logger.warning(
            "mismatch.lr waits for a surge over a baseline of %d batches, and this training has %d steps: the rate will not "
            "be lowered. Set mismatch.lr.baseline_window, or give mismatch.lr.period.",
            window,
            steps,
        )


# Statistics.


def length_sums(lengths: Tensor, truncated: Tensor | None = None) -> Sums:
    """Return the sums of this rank's lengths `[B]`, tokens, and of those that were cut off, which all ranks give or none."""
    lengths = lengths.to("cpu", torch.float64)
    sums = {"responses": torch.tensor(float(len(lengths)), dtype=torch.float64), "response_tokens": lengths.sum()}
    if truncated is not None:
        sums["truncated_responses"] = truncated.to("cpu").bool().sum().double()
    return sums


def length_statistics(sums: Sums) -> dict[str, float]:
    """Return `responses`, `response_length` and `truncated_fraction` of summed lengths; the latter two are absent if unknown."""
    responses = float(sums["responses"])
    statistics = {"responses": responses}
    if responses:
        statistics["response_length"] = float(sums["response_tokens"]) / responses
        if "truncated_responses" in sums:
            statistics["truncated_fraction"] = float(sums["truncated_responses"]) / responses
    return statistics


def leading_sums(*, old: Tensor, rollout: Tensor, mask: Tensor) -> Sums:
    """Return those of `gap_sums` that `gap_statistics` needs, for `sums.over_ranks`."""
    sums = gap_sums(old=old, rollout=rollout, mask=mask)
    return {name: sums[name] for name in ("k3", F_TAU, "tokens")}


def gap_statistics(sums: Sums) -> dict[str, float]:
    """Return `mismatch_kl` and `f_tau` of summed gaps: k3 and F(1.1), means over tokens; 0 without tokens."""
    tokens = max(float(sums["tokens"]), 1.0)
    return {"mismatch_kl": float(sums["k3"]) / tokens, "f_tau": float(sums[F_TAU]) / tokens}


def numerics_statistics(sums: Sums) -> dict[str, float]:
    """Return the statistics of `drift_sums`, of the numerics alone because drift is not mismatch; no measurement if unknown."""
    metrics = gap_metrics(part(sums, "numerics"))
    if "k3_kl" not in metrics:
        return {"responses": 0.0}
    return {"mismatch_kl": metrics["k3_kl"], "f_tau": metrics[F_TAU]}


def leading_statistics(
    trigger: Trigger, lengths: Tensor, truncated: Tensor, gap: Mapping[str, float]
) -> dict[str, float]:
    """Return what a trigger needs of a whole batch that was measured elsewhere; {} if that is nothing, or `gap` lacks it."""
    if trigger == "response_length":
        return length_statistics(length_sums(lengths, truncated))
    if trigger in ("mismatch_kl", "f_tau") and "k3_kl" in gap:
        return {"mismatch_kl": gap["k3_kl"], "f_tau": gap[F_TAU]}
    return {}
