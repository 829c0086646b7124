"""Writes into adapters/trl/upstream.toml what the source of TRL's adapter imports and reads of its peers, and in which files."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "adapters/trl/upstream.toml"
LINE = "# Written by `python docs/trl_list.py`; do not edit below.\n"
FOLDERS = ("adapters/trl", "adapters/transformers", "adapters/accelerate", "patches/trl")
PEERS = ("trl", "transformers", "accelerate", "peft", "deepspeed", "vllm")
TRL = FOLDERS[0]
OWNERS = {
    "trainer": ("trainer",),
    "settings": ("args",),
    "engine": ("vllm_generation", "generation", "_inner"),
    "client": ("_client",),
    "accelerator": ("accelerator",),
    "batch": ("inputs", "output"),
}
"""Names by which our source calls TRL's objects; TRL's batches are mappings, whose keys count."""
Names = dict[str, set[str]]
"""Names of peers, and the files that use them."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the files of TRL's adapter and of what it rests on, parsed."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).glob("*.py")):
            if file.name != "doctor.py":
                yield f"{folder}/{file.name}", ast.parse(file.read_text(encoding="utf-8"))


def imports() -> Names:
    """Return what is imported of peers."""
    found = defaultdict[str, set[str]](set)
    for name, module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in PEERS:
                for alias in node.names:
                    found[f"{node.module}:{alias.name}"].add(name)
    return found


def owner_of(node: ast.AST) -> str | None:
    """Return whose attribute or key an expression reads; None if it is no object of TRL's."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
    return next((owner for owner, names in OWNERS.items() if name in names), None)


def reads() -> dict[str, Names]:
    """Return, by TRL's object, the attributes, or the keys of a batch, that adapters/trl reads."""
    found: dict[str, Names] = {owner: defaultdict(set) for owner in OWNERS}
    for name, module in modules():
        if not name.startswith(TRL):
            continue
        for node in ast.walk(module):
            match node:
                case ast.Attribute(value=value, attr=read, ctx=ast.Load()) if owner_of(value) not in (None, "batch"):
                    found[str(owner_of(value))][read].add(name)
                case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(read)), *_]) if owner_of(
                    value
                ):
                    found[str(owner_of(value))][read].add(name)
                case ast.Subscript(value=value, slice=ast.Constant(value=str(read))) if owner_of(value) == "batch":
                    found["batch"][read].add(name)
                case ast.Call(
                    func=ast.Attribute(value=value, attr="get"), args=[ast.Constant(value=str(read)), *_]
                ) if owner_of(value) == "batch":
                    found["batch"][read].add(name)
    return found


def table(title: str, rows: Mapping[str, set[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [f'"{name}" = [{", ".join(f"{file!r}" for file in sorted(files))}]' for name, files in sorted(rows.items())]
    return [f"[{title}]", *(line.replace("'", '"') for line in lines), ""]


def written() -> str:
    """Return the list with its last part made anew."""
    by_hand = LIST.read_text(encoding="utf-8").partition(LINE)[0]
    made = table("imports", imports())
    for owner, rows in reads().items():
        made += table(f"reads.{owner}", rows)
    return by_hand.rstrip() + "\n\n" + LINE + "\n" + "\n".join(made).rstrip() + "\n"


if __name__ == "__main__":
    LIST.write_text(written(), encoding="utf-8")
