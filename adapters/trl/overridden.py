"""Attributes and methods of an object, replaced for the time of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def overridden(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object for the time of a block."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextmanager
def shadowed(target: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Put functions before an object's methods for the time of a block, also before methods that a subclass overrides."""
    own = vars(target)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del own[name]
        own.update(before)
