"""Compares the model configurations of the two sides, to say which side is at fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mismatch_ext.adapters.doctor.sides import Run

from mismatch_ext.doctor.configs import KNOWN, last_part


def differences(sides: Run) -> dict[str, tuple[Any, Any]]:
    """Return the engine's and the trainer's value of each field in `KNOWN` that differs, by the field's path."""
    trainer = dict(_flat(_config(sides.model)))
    overrides = sides.arguments.get("hf_overrides", {})
    engine = dict(
        _flat(_config(sides.engine_model or sides.model) | (overrides if isinstance(overrides, dict) else {}))
    )
    return {
        path: (engine.get(path), trainer.get(path))
        for path in sorted(engine.keys() | trainer.keys())
        if last_part(path) in KNOWN and engine.get(path) != trainer.get(path)
    }


def engines_own(sides: Run, field: str) -> tuple[int, ...]:
    """Return the integers that the engine's configuration has in a field where the trainer's has another value."""
    return tuple(
        engine
        for path, (engine, _) in differences(sides).items()
        if last_part(path) == field and isinstance(engine, int)
    )


def _config(path: str) -> dict[str, Any]:
    from mismatch_ext.adapters.transformers.peft_adapters import whole
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(whole(path)).to_dict())


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
