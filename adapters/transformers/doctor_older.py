"""Causes in which an engine has weights of another checkpoint, or lacks the adapter: all weights, or one layer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.transformers.doctor import Scorer, scored_under
from mismatch_ext.adapters.transformers.doctor_changes import weights
from mismatch_ext.adapters.transformers.doctor_models import load_model

from mismatch_ext.doctor import Cause


def of_older(scorer: Scorer, path: str | Path, *, base: bool = False) -> list[Cause]:
    """Return the causes in which weights are another checkpoint's.

    Args:
        scorer: The scorer of the sample.
        path: Path of the other checkpoint or adapter.
        base: Whether the path is the base model of the trainer's adapter.
    """
    model = scorer.model
    other = load_model(path, "--model" if base else "--older")
    theirs = {name: p.detach().to(scorer.engine_dtype) for name, p in other.named_parameters()}
    layers = sorted({int(part) for name in theirs if "layers." in name and (part := _layer(name)).isdigit()})

    def cause(key: str, said: str, chosen: Callable[[int], Iterable[str]], **given: Any) -> Cause:
        def change(x: float) -> Any:
            return weights(model, {name: theirs[name] for name in chosen(int(x))})

        return scored_under(
            scorer,
            change,
            key=key,
            family="weights",
            said=said,
            remedy="adapter" if key == "adapter_not_applied" else "weights",
            **given,
        )

    has = f"the engine has the weights of {path}"
    whole = ("adapter_not_applied", f"{has}: the adapter is not applied") if base else ("stale_weights", has)
    found = [
        cause(*whole, lambda _: theirs),
        cause("stale_layer", f"layer {{x}} of the engine has the weights of {path}",
              lambda x: [name for name in theirs if _layer(name) == str(layers[x])],
              grid=tuple(map(float, range(len(layers)))), names=tuple(map(str, layers))),
    ]  # fmt: skip
    return [listed for listed in found if listed.grid]


def _layer(name: str) -> str:
    return name.partition("layers.")[2].partition(".")[0]
