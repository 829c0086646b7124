"""Digests of upstream source, which show whether a patch still meets the code that it was written for."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from typing import Any

from mismatch_ext.errors import PatchDriftError, PatchError
from mismatch_ext.patching.symbols import import_target_module, locate, unwrap_descriptor

DIGEST_LENGTH = 16


def source_digest(obj: object) -> str:
    """Digest of the source of a function, method, descriptor or class: 16 hexadecimal digits.

    The digest is SHA-256 over the dedented source text, decorators and comments included. If `functools.wraps`
    was used, the innermost function's source is taken, and the name of every wrapper around it is part of the
    digest, so that other people's monkey-patches show. The source of a class is its whole class statement,
    without the source of its bases.

    Args:
        obj: A function, staticmethod, classmethod, property (its getter), cached_property or class.

    Raises:
        PatchDriftError: There is no source to read, because it is a value, a built-in, an extension type or exec'd code.
    """
    innermost = unwrap_descriptor(obj)
    wrappers = []
    while not isinstance(innermost, type) and hasattr(innermost, "__wrapped__"):
        wrappers.append(_layer_name(innermost))
        innermost = unwrap_descriptor(innermost.__wrapped__)
    try:
        source = inspect.getsource(innermost)
    except (OSError, TypeError) as error:
        raise PatchDriftError(f"{obj!r} has no source that can be read ({error}).") from error
    lines = textwrap.dedent(source).splitlines()
    return hashlib.sha256("\n".join(wrappers + lines).encode()).hexdigest()[:DIGEST_LENGTH]


def qualified_name(value: object) -> str:
    """Return "package.module.Qualified.name" of a function, method or class, or of the class of any other object.

    Raises:
        PatchError: The name does not identify it, because it is a lambda, a nested function, a partial or a built-in.
    """
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if "<" in name or named.__module__ in ("builtins", "functools"):
        raise PatchError(
            f"{value!r} is no handler of a patch: its name, {name}, goes into the patch's digest and does not tell what it "
            "does. Take a function or class at the top of a module, a method, or an object of such a class."
        )
    return name


def _layer_name(wrapper: Any) -> str:
    """Return the name of a wrapper's own code; unlike `__name__`, `functools.wraps` does not overwrite it."""
    code = getattr(wrapper, "__code__", None)
    if code is None:
        return f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
    return f"{wrapper.__globals__.get('__name__')}.{code.co_qualname}"


def current_digest(target: str) -> str:
    """Return the present digest of a target's source, to be written into `Patch.source_digests`.

    Args:
        target: "package.module:Attribute.path"; the module is imported.

    Raises:
        PatchDriftError: The target does not exist or has no source.
    """
    import_target_module(target, "current_digest")
    return source_digest(locate(target, "current_digest").original)
