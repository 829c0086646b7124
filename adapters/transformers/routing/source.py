"""Find out how a module's forward chooses experts by reading its code, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType

from torch import nn

# Names of ways to choose that are not a top-k over scores: sampling, taking the best, or looking up token ids in a table.
_OTHERS = {"sparsemixer", "argmax", "max", "route_tokens", "tid2eid", "multinomial"}
# Answers of `calls_topk`, by class.
_CALLS_TOPK: dict[type[nn.Module], bool] = {}


def calls_topk(kind: type[nn.Module]) -> bool:
    """Tell whether `topk` is named in a class's forward, or in a method of the class that forward calls, directly or not."""
    if kind not in _CALLS_TOPK:
        _CALLS_TOPK[kind] = _reaches_topk(kind)
    return _CALLS_TOPK[kind]


def _reaches_topk(kind: type[nn.Module]) -> bool:
    methods: dict[str, set[str]] = {}
    for owner in reversed(kind.__mro__):
        if owner in nn.Module.__mro__:
            continue
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if isinstance(code, CodeType):
                methods[name] = set(_names(code))
    reached = {"forward"} & set(methods)
    while more := {name for method in reached for name in methods[method] & methods.keys()} - reached:
        reached |= more
    return any("topk" in methods[method] for method in reached)


def chooses_by(kind: type[nn.Module]) -> str:
    """Name what a router's forward calls to choose experts instead of a top-k."""
    code = inspect.unwrap(kind.forward).__code__
    return ", ".join(name for name in code.co_names if name in _OTHERS) or "not by its forward alone"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
