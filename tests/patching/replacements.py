"""Replacements that patches of these tests make."""

from __future__ import annotations

from typing import Any


def subclass(original: type) -> type:
    class Loud(original):  # type: ignore[misc, valid-type]
        def run(self) -> str:
            return f"!{super().run()}"

    return Loud


def unwrapped(original: Any) -> Any:
    """Replace without functools.wraps."""

    def shout(*args: Any) -> str:
        return f"!{original(*args)}"

    return shout
