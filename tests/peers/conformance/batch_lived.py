"""What a host's instances of this package hold of a batch: nothing, once its step is over. Imports no host."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

KINDS = ("RolloutPass", "Scored", "RolloutRecord", "RolloutBatch", "RoutingTrace", "SampleRoutes")
"""Classes of what belongs to a batch."""
LASTING = ("SentTensor",)
"""Classes of what is kept from one weight update to the next."""


def own_names(kind: type) -> set[str]:
    """Return the attributes that classes outside of this package and its tests set on their instances, by their source."""
    found: set[str] = set()
    for base in kind.__mro__[:-1]:
        if base.__module__.partition(".")[0] not in ("mismatch_ext", "tests"):
            found |= set(re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?=[^=]", inspect.getsource(base)))
    return found


def batch_lived(host: Any, rows: int) -> list[str]:
    """Return where an instance, or what it holds of this package's objects, has something of a batch.

    Args:
        host: A trainer or engine with this package's methods; what its own class keeps is its own affair.
        rows: Rows of a batch, of which there are as many entries of a list or tensor.
    """
    return sorted(_walk(type(host).__name__, host, own_names(type(host)), rows, set()))


def _walk(path: str, value: Any, skipped: set[str], rows: int, seen: set[int]) -> Iterator[str]:
    if id(value) in seen or type(value).__name__ in LASTING:
        return
    seen.add(id(value))
    if type(value).__name__ in KINDS:
        yield path
    elif isinstance(value, Tensor):
        if value.dim() and len(value) == rows:
            yield path
    elif isinstance(value, (list, tuple)):
        if len(value) == rows:
            yield path
        for index, entry in enumerate(value[:64]):
            yield from _walk(f"{path}[{index}]", entry, set(), rows, seen)
    elif isinstance(value, Mapping):
        for key, entry in list(value.items())[:64]:
            yield from _walk(f"{path}[{key!r}]", entry, set(), rows, seen)
    elif skipped or type(value).__module__.startswith("mismatch_ext."):
        for name, entry in vars(value).items() if hasattr(value, "__dict__") else ():
            if name not in skipped:
                yield from _walk(f"{path}.{name}", entry, set(), rows, seen)
