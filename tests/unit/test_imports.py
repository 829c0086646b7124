"""Imports run one way, and the core imports no trainer and no engine."""

from __future__ import annotations

import ast
import subprocess
import sys
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


def imported(source: str) -> list[str]:
    """Return the names of all modules that a source text imports, at any depth."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from mismatch_ext import adapters` is an import of mismatch_ext.adapters.
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def upward(source: str, layer: int) -> list[str]:
    """Return the imports of a source text that point to a higher layer."""
    return [name for name in imported(source) if (layer_of(name) or 0) > layer]


@pytest.mark.parametrize("folder", ["mismatch_ext", "patches", "adapters"])
def test_no_module_imports_from_a_higher_layer(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(ROOT)): upward(f.read_text(encoding="utf-8"), LAYERS[folder]) for f in files}
    assert not {name: names for name, names in wrong.items() if names}


@pytest.mark.parametrize(
    ("source", "layer"),
    [
        ("import mismatch_ext.adapters.trl", 0),
        ("from mismatch_ext import patches", 0),
        ("def f():\n    from mismatch_ext.adapters import vllm", 1),
        ("import examples.demo", 2),
    ],
)
def test_the_direction_check_can_fail(source: str, layer: int) -> None:
    assert upward(source, layer)


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


def test_the_hygiene_check_can_fail() -> None:
    assert "transformers" in loaded_peers("import mismatch_ext, transformers")
