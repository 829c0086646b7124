"""Writes into adapters/verl/upstream.toml what the source of verl's adapter imports, reads and sets of its peers."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "adapters/verl/upstream.toml"
LINE = "# Written by `python docs/verl_list.py`; do not edit below.\n"
FOLDERS = ("adapters/verl/**/*.py", "patches/verl/*.py", "adapters/doctor/verl*.py")
PEERS = ("verl", "ray", "transfer_queue", "sglang", "vllm", "megatron")
VARIABLES = ("VERL_", "RAY_", "SGLANG_", "VLLM_")


def trees() -> list[ast.Module]:
    """Return the parsed modules of verl's adapter and patches."""
    files = sorted(path for folder in FOLDERS for path in ROOT.glob(folder))
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def imports(modules: list[ast.Module]) -> dict[str, list[str]]:
    """Return the names that are imported of each peer's module; none where the module itself is."""
    found = defaultdict[str, set[str]](set)
    for node in (node for module in modules for node in ast.walk(module)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] in PEERS:
            found[node.module] |= {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PEERS:
                    found[alias.name] |= set()
    return {module: sorted(names) for module, names in sorted(found.items())}


def _defined(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def attributes(modules: list[ast.Module]) -> dict[str, list[str]]:
    """Return, by our class, the attributes that it reads of itself and no class of ours defines: they are its peers'."""
    kinds = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    ours = {name for kind in kinds for name in _defined(kind)}
    elsewhere = {
        alias.name
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mismatch_ext")
        for alias in node.names
    } - {kind.name for kind in kinds}
    found = defaultdict[str, set[str]](set)
    for kind in kinds:
        if elsewhere & {ast.unparse(base) for base in kind.bases}:
            continue  # what it does not define is ours, too
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                if node.attr not in ours and not node.attr.startswith("__"):
                    found[kind.name].add(node.attr)
    return {kind: sorted(names) for kind, names in sorted(found.items())}


def variables(modules: list[ast.Module]) -> list[str]:
    """Return the environment variables of peers that are named anywhere."""
    texts = {node.value for module in modules for node in ast.walk(module) if isinstance(node, ast.Constant)}
    return sorted(text for text in texts if isinstance(text, str) and text.isupper() and text.startswith(VARIABLES))


def _table(name: str, rows: Mapping[str, list[str]]) -> list[str]:
    return [f"[{name}]", *(f'"{key}" = {list_of(names)}' for key, names in rows.items()), ""]


def list_of(names: list[str]) -> str:
    """Return a list of texts as TOML has it."""
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def written() -> str:
    """Return the list with its last part made anew."""
    modules = trees()
    by_hand = LIST.read_text(encoding="utf-8").partition(LINE)[0]
    made = [*_table("imports", imports(modules)), *_table("attributes", attributes(modules))]
    made += ["[environment]", f"variables = {list_of(variables(modules))}"]
    return by_hand + LINE + "\n" + "\n".join(made) + "\n"


if __name__ == "__main__":
    LIST.write_text(written(), encoding="utf-8")
