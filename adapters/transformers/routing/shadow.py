"""Replace methods on the objects of one model while a context is open.

A replacement is hidden from torch.compile, which would otherwise compile it for every layer, and again for every trace. A
replacement finds the original method through the object that it is called on, because a copy of the model has a copy of the
replacement, and a copy of what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from mismatch_ext.errors import ReplayError

Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Around:
    """Functions to run before and after a method; the method itself may be compiled.

    Args:
        enter: Takes the arguments (positional, named); returns a state.
        leave: Takes that state, and whether the method returned.
    """

    enter: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    leave: Callable[[Any, bool], None]


@dataclass(frozen=True, kw_only=True)
class Instead:
    """A function to run instead of a method; nothing in it is compiled.

    Args:
        call: Takes the method, and its arguments.
    """

    call: Call


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A function that changes what a method is given first; the method itself may be compiled.

    Args:
        change: Takes the first argument, and returns the one for the method.
    """

    change: Call


def shadow(stack: ExitStack, module: Any, name: str, by: Around | Instead | Handed) -> None:
    """Replace a method by a stand-in, until the stack is closed and restores what was there.

    Args:
        stack: Gets the callback that restores the method.
        module: The module, or another object.
        name: Name of its method, or of a function that it keeps.
        by: The stand-in.

    Raises:
        ReplayError: The method has a stand-in already.
    """
    key, attributes = (id(module), name), vars(module)
    if key in _SHADOWS:
        raise ReplayError(
            f"{type(module).__name__}.{name} is already part of a context that records or replays routing, and the model was "
            "wrapped or changed since; leave that context first."
        )
    if name in attributes.get(_BEFORE, ()):
        _put_back(attributes, name)  # the module is a copy that was made while another context was open
    _SHADOWS[key] = by, getattr(module, name)
    stack.callback(_restore, key, attributes)
    attributes.setdefault(_BEFORE, {})[name] = attributes.get(name)
    kind: type = type(by)
    attributes[name] = MethodType(_stand_in(name, kind), module)


def uncompiled(function: Call, *, inside: bool = False) -> Call:
    """Return a function that torch.compile does not trace.

    Args:
        function: The function.
        inside: Whether what it calls in turn may be compiled.
    """
    # This imports torch._dynamo, which takes seconds, but transformers' models have imported it before.
    compiler: Any = torch.compiler
    hidden: Call = compiler.disable(function, recursive=not inside)
    return hidden


@cache
def _stand_in(name: str, kind: type) -> Call:
    def instead(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        by, plain = _found(module, name)
        return plain(*args, **kwargs) if by is None else by.call(plain, *args, **kwargs)

    if kind is Instead:
        return uncompiled(instead)
    find = uncompiled(_found)
    change = uncompiled(lambda by, first: by.change(first) if by else first)

    def handed(module: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        by, plain = find(module, name)
        return plain(change(by, first), *args, **kwargs)

    if kind is Handed:
        return uncompiled(handed, inside=True)
    enter = uncompiled(lambda by, args, kwargs: by and by.enter(args, kwargs))
    leave = uncompiled(lambda by, state, returned: by and by.leave(state, returned))

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        by, plain = find(module, name)
        state, returned = enter(by, args, kwargs), False
        try:
            output = plain(*args, **kwargs)
            returned = True
        finally:
            leave(by, state, returned)
        return output

    return uncompiled(run, inside=True)


_BEFORE = "_mismatch_before"
"""Attribute with what the object had under the names that are replaced, None for nothing; a copy of the object copies it."""
_SHADOWS: dict[tuple[int, str], tuple[Around | Instead | Handed, Call]] = {}


def _found(module: Any, name: str) -> tuple[Any, Call]:
    # A copy of the model that was made while the context was open has stand-ins, but does not belong to the context.
    return _SHADOWS.get((id(module), name)) or (None, _before(module, name))


def _before(module: Any, name: str) -> Call:
    attribute: Call | None = vars(module)[_BEFORE][name]
    return getattr(type(module), name).__get__(module) if attribute is None else attribute


def _restore(key: tuple[int, str], attributes: dict[str, Any]) -> None:
    del _SHADOWS[key]
    _put_back(attributes, key[1])


def _put_back(attributes: dict[str, Any], name: str) -> None:
    before = attributes[_BEFORE].pop(name)
    if not attributes[_BEFORE]:
        del attributes[_BEFORE]
    if before is None:
        del attributes[name]
    else:
        attributes[name] = before
