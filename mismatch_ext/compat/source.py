"""Read what a peer defines without importing it: an engine takes seconds to import, and a broken one may not import at all."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Gone(LookupError):
    """Something is no longer where it was; the message is a sentence that says what."""


@dataclass(frozen=True)
class Module:
    """One module's source.

    Args:
        name: Dotted name.
        path: Its file.
    """

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """Its source text."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> list[str]:
        """Its source text, split into lines."""
        return self.text.splitlines()

    @cached_property
    def body(self) -> list[ast.stmt]:
        """Its statements, including those inside conditional blocks."""
        return list(_flat(ast.parse(self.text).body))


@dataclass(frozen=True)
class Definition:
    """What a name is bound to in a module or a class.

    Args:
        target: The name that was asked for.
        module: The module that defines it.
        node: The statement that defines it.
    """

    target: str
    module: Module
    node: ast.stmt

    @property
    def function(self) -> Function:
        """The function.

        Raises:
            Gone: It is something else.
        """
        if not isinstance(self.node, Function):
            raise Gone(f"{self.target} is no function any more.")
        return self.node

    @property
    def parameters(self) -> dict[str, str | None]:
        """Its parameters in order, each with the source of its default."""
        given = self.function.args
        plain = [*given.posonlyargs, *given.args]
        defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
        both = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        return {argument.arg: None if value is None else ast.unparse(value) for argument, value in both}

    @property
    def value(self) -> str | None:
        """Source text of the value that a field or name is given; None if it is given none."""
        value = self.node.value if isinstance(self.node, ast.Assign | ast.AnnAssign) else None
        return None if value is None else ast.unparse(value)

    @property
    def text(self) -> str:
        """Its source text with decorators and comments, dedented."""
        decorators = getattr(self.node, "decorator_list", [])
        start = min([self.node.lineno, *(decorator.lineno for decorator in decorators)])
        return textwrap.dedent("\n".join(self.module.lines[start - 1 : self.node.end_lineno]))

    @property
    def digest(self) -> str:
        """Digest of `text`."""
        return hashlib.sha256("\n".join(self.text.splitlines()).encode()).hexdigest()[:16]


class Sources:
    """The sources of installed packages; each file is read once."""

    def __init__(self) -> None:
        self._modules: dict[str, Module] = {}

    def module(self, name: str) -> Module:
        """Return a module by its dotted name.

        Raises:
            Gone: The module does not exist.
        """
        if name not in self._modules:
            self._modules[name] = Module(name, _file(name))
        return self._modules[name]

    def find(self, target: str) -> Definition:
        """Return what a target names, also if a class inherits it or a module imports it from its own package.

        Args:
            target: "package.module:Attribute.path"; an attribute that a class's methods set on `self` counts.

        Raises:
            Gone: The target does not exist.
        """
        name, _, path = target.partition(":")
        module = self.module(name)
        first, *rest = path.split(".")
        found = self._in_module(module, first)
        for attribute in rest:
            found = found and self._in_class(*found, attribute)
        if found is None:
            raise Gone(f"{target} is not there.")
        return Definition(target, *found)

    def _in_module(self, module: Module, name: str) -> tuple[Module, ast.stmt] | None:
        node = _bound(module.body, name)
        if node is not None:
            return module, node
        for statement in module.body:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name and (origin := _origin(module, statement)) is not None:
                        return self._in_module(self.module(origin), alias.name)
        return None

    def _in_class(self, module: Module, owner: ast.stmt, name: str) -> tuple[Module, ast.stmt] | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        node = _bound(list(_flat(owner.body)), name) or _set_on_self(owner, name)
        if node is not None:
            return module, node
        for base in owner.bases:
            if isinstance(base, ast.Name):
                try:
                    found = self._in_module(module, base.id)
                except Gone:  # the base's package is not installed
                    continue
                if found is not None and found[1] is not owner and (inherited := self._in_class(*found, name)):
                    return inherited
        return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)


def _bound(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """Return the last statement that binds a name: overloads come before the function itself."""
    for statement in reversed(body):
        if isinstance(statement, Function | ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names = [statement.target.id]
        else:
            continue
        if name in names:
            return statement
    return None


def _set_on_self(owner: ast.ClassDef, name: str) -> ast.stmt | None:
    for node in ast.walk(owner):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr == name and ast.unparse(target.value) == "self":
                assert isinstance(node, ast.stmt)
                return node
    return None


def _origin(module: Module, statement: ast.ImportFrom) -> str | None:
    """Return the module that a statement imports from; None if it belongs to another package."""
    if statement.level == 0:
        same = statement.module is not None and statement.module.split(".")[0] == module.name.split(".")[0]
        return statement.module if same else None
    package = module.name.split(".")
    drop = statement.level - (module.path.name == "__init__.py")
    parts = package[: len(package) - drop] + ([statement.module] if statement.module else [])
    return ".".join(parts)


def _file(name: str) -> Path:
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module in sys.modules that was not found by an importer
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        place = Path(folder, *rest)
        for path in (place.with_suffix(".py") if rest else place / "__init__.py", place / "__init__.py"):
            if path.is_file():
                return path
    raise Gone(f"there is no module {name}.")
