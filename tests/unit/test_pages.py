"""README, docs and examples: links have targets, Python blocks compile, and `mismatch` blocks are ones that are taken."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

import mismatch_ext
from mismatch_ext.config import MismatchConfig

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "evidence").glob("*.md")),
]


def plain(path: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", plain(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", plain(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_what_it_claims_to_be(page: Path) -> None:
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for language, block in blocks:
        if language == "python":
            compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif "mismatch" in (settings := yaml.safe_load(block)):
            MismatchConfig.parse(settings["mismatch"])


EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in (".py", ".sh", ".yaml")]
# An override of verl's, as on a command line or in a sentence: its key, and its value.
OVERRIDE = re.compile(r"\+mismatch\.([a-z_.]+=(?:\{[^}\n]*\}|[\w.-]+))")
SECTIONS = {key.name for key in fields(MismatchConfig)}


def blocks_in_python(text: str) -> list[Any]:
    """Return the mappings in Python code whose keys are sections, apart from those that are made of variables."""
    found: list[Any] = []
    for node in ast.walk(compile(text, "", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
        if isinstance(node, ast.Dict) and {getattr(key, "value", None) for key in node.keys} <= SECTIONS:
            with suppress(ValueError):
                found.append(ast.literal_eval(node))
    return found


def blocks_of(path: Path) -> list[Any]:
    """Return the blocks of an example or a page: mappings in Python and YAML, and overrides of verl."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return blocks_in_python(text)
    if path.suffix == ".yaml":
        return [part["mismatch"] for part in yaml.safe_load_all(text) if "mismatch" in part]
    found = []
    for override in OVERRIDE.findall(text):
        read = OverridesParser.create().parse_override(override)
        found.append(keyed(read.key_or_group, read.value()))
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        found += blocks_in_python(block)
    return found


def keyed(key: str, value: Any) -> Any:
    """Return the mapping in which a value has a dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("path", [*EXAMPLES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_and_override_is_taken(path: Path) -> None:
    for block in blocks_of(path):
        MismatchConfig.parse(block)


def test_examples_have_blocks() -> None:
    assert sum(bool(blocks_of(path)) for path in EXAMPLES) > 8
    assert sum(bool(blocks_of(path)) for path in PAGES) > 4


USERS_TEXTS = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "reference.md"),
    *sorted((ROOT / "examples").rglob("*.py")),
]


def core_names(text: str) -> set[str]:
    """Return what a page or an example names of the core: `module.name`s that it imports or mentions."""
    named = set(re.findall(r"(?<![\w./-])mismatch_ext\.([A-Za-z_][\w.]*)", text))
    for module, names in re.findall(r"^ *from mismatch_ext(\.[\w.]+)? import (\([^)]*\)|[^\n#]*)", text, re.M):
        listed = [name.split(" as ")[0].strip() for name in names.strip("()").split(",")]
        named |= {f"{module[1:]}.{name}".lstrip(".") for name in listed if name}
    return {name.rstrip(".") for name in named if not name.startswith(("adapters", "patches"))}


def test_users_need_no_other_name_of_the_core_than_the_public_ones() -> None:
    others = {
        f"{text.relative_to(ROOT)}: mismatch_ext.{name}"
        for text in USERS_TEXTS
        for name in core_names(text.read_text(encoding="utf-8"))
        # The oracle for tests and the protocol of adapters have a module each.
        if name.split(".")[0] not in (*mismatch_ext.__all__, "testing", "sides")
    }
    assert not others, "\n".join(sorted(others))
    assert len(mismatch_ext.__all__) <= 30


def test_every_public_name_has_its_entry_in_the_api_reference() -> None:
    listed = re.findall(r"^::: mismatch_ext\.([\w.]+)$", (ROOT / "docs/reference.md").read_text("utf-8"), flags=re.M)
    in_signatures = ["Batch", "HostNames", "Ranks"]
    assert sorted(entry.split(".")[-1] for entry in listed) == sorted([*mismatch_ext.__all__, *in_signatures])
    for entry in listed:
        module, _, name = entry.rpartition(".")
        there = getattr(importlib.import_module(f"mismatch_ext.{module}"), name)
        assert name in in_signatures or there is getattr(mismatch_ext, name), entry


POLICIES = {
    "logprobs", "old", "old_logprobs", "logits", "rollout", "rollout_logprobs", "reference", "ref_logprobs", "ref_logits",
}  # fmt: skip


def of_two_policies(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the tensors of policies that a function takes, if it takes two or more."""
    parameters = inspect.signature(function).parameters.values()
    found = [one for one in parameters if one.name in POLICIES and "Tensor" in str(one.annotation)]
    return found if len(found) > 1 else []


def test_public_functions_take_two_policies_by_keyword_because_swapped_ones_raise_no_error() -> None:
    public = {name: getattr(mismatch_ext, name) for name in mismatch_ext.__all__}
    found = {name: of_two_policies(one) for name, one in public.items() if inspect.isfunction(one)}
    found |= {
        f"Run.{name}": of_two_policies(one) for name, one in inspect.getmembers(mismatch_ext.Run, inspect.isfunction)
    }
    by_position = {name for name, all_of in found.items() if any(one.kind is not one.KEYWORD_ONLY for one in all_of)}
    assert not by_position
    assert found["gap_sums"] and found["Run.measure"]


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), flags=re.M))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
