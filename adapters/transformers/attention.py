"""Attention implementations that leave out a part of a model.

transformers' `sdpa` applies no soft cap to attention's scores. Up to 5.19, transformers takes it for Gemma-2 unless it is told
otherwise; newer ones refuse it there. The model's own code, `eager`, computes all of the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mismatch_ext.errors import ConfigError

# Fields of a configuration, which are also attributes of its attention modules, that cap attention's scores softly.
CAPS = ("attn_logit_softcapping",)
# Fields that give attention sinks: learned logits to which no value belongs.
SINKS = ("add_swa_attention_sink_bias", "add_full_attention_sink_bias")
REFERENCE = "eager"
# Implementations that run in float32 on every device. Others compute the same with kernels of their own.
PORTABLE = ("eager", "sdpa")


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def implementation_of(model: nn.Module) -> str:
    """Return the attention implementation of a model's text part; "" for a model that is not of transformers."""
    return str(getattr(_text_config(model), "_attn_implementation", None) or "")


def complete_implementation(model: nn.Module) -> str:
    """Return the implementation that computes all of a model's attention.

    It is `eager` if the configuration has a soft cap or sinks, and otherwise the one that the model has.
    """
    text = _text_config(model)
    if any(getattr(text, name, None) for name in (*CAPS, *SINKS)):
        return REFERENCE
    return implementation_of(model)


def trainer_implementation(model: nn.Module, asked: str) -> str:
    """Return the implementation with which a run's trainer is rebuilt: the one that it has, or one that computes the same.

    Args:
        model: The model as transformers loads it.
        asked: The run's implementation; "" if the run leaves the choice to transformers.

    Raises:
        ConfigError: The model does not run with it.
    """
    if not asked:
        return implementation_of(model)
    if asked not in PORTABLE:
        return complete_implementation(model)
    try:
        found: str = model.get_correct_attn_implementation(asked)  # type: ignore[operator]
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"attention {asked!r} does not run with {type(model).__name__}: {' '.join(str(error).split())[:200]} Leave it out."
        ) from error
    return found


@contextmanager
def attending_by(model: Any, implementation: str) -> Iterator[None]:
    """Let a model attend by another implementation, and afterwards by its own again."""
    if implementation == implementation_of(model):
        yield
        return
    # A model with several parts, such as vision and text, has one for each, and setting one name sets all.
    before = {"": model.config._attn_implementation}
    for name in model.config.sub_configs:
        part = getattr(model.config, name, None)
        if part is not None:
            before[name] = part._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def soft_caps(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules whose attention has a soft cap, each with the name of that attribute."""
    return [(module, name) for module in model.modules() for name in CAPS if getattr(module, name, None)]


@contextmanager
def without_caps(model: nn.Module) -> Iterator[None]:
    """Take the soft caps out of a model's attention, and afterwards put them back."""
    caps = [(module, name, getattr(module, name)) for module, name in soft_caps(model)]
    try:
        for module, name, _ in caps:
            setattr(module, name, None)
        yield
    finally:
        for module, name, cap in caps:
            setattr(module, name, cap)


@dataclass(frozen=True, kw_only=True)
class DroppedCap:
    """A soft cap that a model's attention leaves out; as a text, what to tell the user.

    Args:
        implementation: The attention implementation.
        cap: The cap in the configuration.
        moved: Mean change of log-probabilities by `eager`, nats per token; None if it was not measured.
        tokens: Number of tokens that it was measured on.
    """

    implementation: str
    cap: float
    moved: float | None = None
    tokens: int = 0

    def __str__(self) -> str:
        missing = (
            f"the trainer's attention ({self.implementation}) has no soft cap, and the model's configuration has one of "
            f"{self.cap:g}: an engine that applies it computes another policy"
        )
        if self.moved is None:
            return (
                f"{missing}. This was not measured, because the model cannot be run before training begins. Set "
                "attn_implementation: eager."
            )
        return (
            f"{missing}. With attn_implementation: eager, log-probabilities move by {self.moved:.2g} nats per token "
            f"({self.tokens} probe tokens). Set it."
        )


def dropped_cap(model: nn.Module, score: Callable[[], Tensor] | None) -> DroppedCap | None:
    """Measure whether a model's attention leaves out its soft cap; None if it applies it, or has none.

    It does if its log-probabilities are nearer to those of `eager` without the cap than half the way to those with it. This also
    holds in half precision, where all three round.

    Args:
        model: The model.
        score: Returns the model's log-probabilities of some tokens, in nats. None if the model cannot be run now; then `sdpa` is
            taken to have no soft cap.
    """
    caps, implementation = soft_caps(model), implementation_of(model)
    if not caps or implementation == REFERENCE:
        return None
    module, name = caps[0]
    cap = float(getattr(module, name))
    if score is None:
        return DroppedCap(implementation=implementation, cap=cap) if implementation == "sdpa" else None
    own = score()
    with attending_by(model, REFERENCE):
        capped = score()
        with without_caps(model):
            capless = score()
    moved, left = float((own - capped).abs().mean()), float((own - capless).abs().mean())
    if left >= moved / 2:
        return None
    return DroppedCap(implementation=implementation, cap=cap, moved=moved, tokens=own.numel())
