"""Imports run one way, and the core imports no trainer and no engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("transformers", "trl", "vllm", "verl", "sglang", "megatron", "accelerate", "datasets")
# Lower may not import upper: examples -> adapters -> patches -> mismatch_ext.
LAYERS = {"mismatch_ext": 0, "patches": 1, "adapters": 2, "examples": 3, "benchmarks": 3}


def layer_of(module: str) -> int | None:
    """Return the layer of an imported module name, or None when it is not ours."""
    parts = module.split(".")
    if parts[0] == "mismatch_ext" and len(parts) > 1 and parts[1] in ("adapters", "patches"):
        return LAYERS[parts[1]]
    return LAYERS.get(parts[0])


def imported(source: str | ast.AST) -> list[str]:
    """Return the names of all modules that a source text or tree imports, at any depth."""
    names = []
    for node in ast.walk(ast.parse(source) if isinstance(source, str) else source):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from mismatch_ext import adapters` is an import of mismatch_ext.adapters.
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def upward(source: str, layer: int) -> list[str]:
    """Return the imports of a source text that point to a higher layer."""
    return [name for name in imported(source) if (layer_of(name) or 0) > layer]


def product_modules() -> dict[str, Path]:
    """Return the files of the product by the names that they are imported under."""
    found = {}
    for folder, package in (("mismatch_ext", ""), ("adapters", ".adapters"), ("patches", ".patches")):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            if folder != "mismatch_ext" or parts[0] not in ("adapters", "patches"):  # links to the other two
                found[".".join([f"mismatch_ext{package}", *parts]).removesuffix(".__init__")] = file
    return found


def edges(name: str, source: str, modules: Collection[str]) -> set[str]:
    """Return what a module runs by importing, in functions too: other modules, and the packages on the way to them.

    What is imported for type checkers alone is never run.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for imported_name in imported(tree):
        parts = imported_name.split(".")
        found |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    # A module's own packages run before it.
    return {other for other in found if other in modules and not f"{name}.".startswith(f"{other}.")}


def test_no_module_imports_one_that_imports_it() -> None:
    modules = product_modules()
    graph = {name: edges(name, file.read_text(encoding="utf-8"), modules) for name, file in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle


# Run where a peer cannot be imported: what is said, and by which exception.
BLOCKED = """
import importlib, sys
for missing, module in [pair.split(":") for pair in sys.argv[1:]]:
    sys.modules[missing] = None
    try:
        importlib.import_module(module)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("imported")
    del sys.modules[missing]
"""


def test_an_adapter_without_its_peer_names_the_extra() -> None:
    cases = {
        "trl:mismatch_ext.adapters.trl": "trl",
        "transformers:mismatch_ext.adapters.transformers": "trl",
    }
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *cases, "trl:mismatch_ext.adapters.vllm"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *refused, vllm = done.stdout.splitlines()
    assert len(refused) == len(cases)
    for case, said in zip(cases, refused, strict=True):
        assert said.startswith(f"PeerVersionError: {case.partition(':')[0]} is not installed"), said
        assert f'pip install ".[{cases[case]}]"' in said
    # vLLM's adapter asks for vLLM when it is given an engine, so that TRL's works without.
    assert vllm == "imported"


@pytest.mark.parametrize("folder", ["mismatch_ext", "patches", "adapters"])
def test_no_module_imports_from_a_higher_layer(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(ROOT)): upward(f.read_text(encoding="utf-8"), LAYERS[folder]) for f in files}
    assert not {name: names for name, names in wrong.items() if names}


def loaded_peers(statements: str) -> list[str]:
    """Run statements in a fresh interpreter and return the peers that they loaded."""
    code = (
        f"{statements}\nimport sys\nprint('peers:', *sorted(set({PEERS!r}) & {{m.split('.')[0] for m in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("peers:")[1].split()


EVERY_CORE_MODULE = """
import importlib, pathlib
for path in sorted(pathlib.Path('mismatch_ext').rglob('*.py')):
    if path.name != '__main__.py':
        importlib.import_module('.'.join(path.with_suffix('').parts).removesuffix('.__init__'))
"""


def test_the_core_imports_no_trainer_and_no_engine() -> None:
    assert loaded_peers(EVERY_CORE_MODULE) == []


def test_the_public_names_load_when_they_are_used() -> None:
    import mismatch_ext

    names = {*mismatch_ext.__all__}
    assert names == set(mismatch_ext._MODULES)
    for name in names:
        assert getattr(mismatch_ext, name).__doc__, name


# Imports a module and prints which of some others were loaded with it.
LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*[name for name in sys.argv[2:] if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("mismatch_ext.report", ["torch"]),
        ("mismatch_ext.log", ["jinja2", "plotly", "mismatch_ext.report", "mismatch_ext.doctor"]),
    ],
)
def test_a_report_needs_no_torch_and_a_run_no_report(module: str, heavy: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, module, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
