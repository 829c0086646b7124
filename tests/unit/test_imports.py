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
        "transformers:mismatch_ext.adapters.trl": "trl",
        "accelerate:mismatch_ext.adapters.trl": "trl",
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
        assert f"pip install mismatch-ext[{cases[case]}]" in said
    # vLLM's adapter asks for vLLM when it is given an engine, so that TRL's works without.
    assert vllm == "imported"


def test_a_command_without_its_peer_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; from mismatch_ext.adapters.cli import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code, "readiness", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "transformers is not installed" in done.stderr and "pip install mismatch-ext[trl]" in done.stderr


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
