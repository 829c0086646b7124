"""verl's names that our classes override: each is claimed, so that a verl without one is refused before the first step."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl")  # part of `make setup`

import verl
import verl.trainer.ppo.v1.trainer_base as trainer_base
from mismatch_ext.adapters import compat
from mismatch_ext.adapters.verl import plugin, upstream
from mismatch_ext.adapters.verl.driver.modes import TRAINERS
from mismatch_ext.adapters.verl.engine import MismatchFSDPEngine
from mismatch_ext.adapters.verl.rollout.client import TurnsClient, VersionedClient
from mismatch_ext.adapters.verl.sampling_mask import MaskedLoops
from mismatch_ext.adapters.verl.worker import MismatchDetachWorker

from mismatch_ext.errors import SeamError
from mismatch_ext.seams import Claim

plugin.unload()  # importing the adapter has loaded it

CLAIMS = [claim for seam in upstream.SEAMS for claim in seam.claims]
CLASSES = (
    *TRAINERS.values(),
    *(MismatchDetachWorker, MismatchFSDPEngine),  # Megatron's is left out of processes that run on a CPU
    *(VersionedClient, TurnsClient, MaskedLoops),
)
ROOT = Path(__file__).parents[3]
ENGINES = (
    "verl.workers.rollout.vllm_rollout",
    "verl.workers.rollout.sglang_rollout",
    "verl.workers.engine.megatron",
)


def overridden(kind: type) -> Iterator[str]:
    """Yield the names of verl's that this package's classes among a class's bases define."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("mismatch_ext")]
    theirs = [base for base in kind.__mro__ if base.__module__.startswith("verl.")]
    for name in {name for base in ours for name in vars(base) if not name.startswith(("__", "_abc"))}:
        if any(name in vars(base) for base in theirs):
            yield name


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_name_that_a_class_of_ours_overrides_is_claimed(kind: type) -> None:
    names = {*overridden(kind)}
    assert names and names <= {claim.target.rpartition(".")[2] for claim in CLAIMS}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.target)
def test_what_is_claimed_is_in_verl(claim: Claim) -> None:
    if not claim.target.startswith(ENGINES):
        assert claim.change(importing=True) is None
        return
    module, _, path = claim.target.partition(":")  # it imports an engine
    source = Path(verl.__path__[0], *module.split(".")[1:]).with_suffix(".py").read_text()
    kind, name = path.split(".")
    assert f"class {kind}" in source and f"def {name}(" in source


@pytest.mark.parametrize("name", ["_compute_old_log_prob", "_update_actor", "_load_checkpoint"])
def test_a_verl_without_a_method_that_we_override_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(trainer_base.PPOTrainer, name)
    with pytest.raises(SeamError, match=f"verl/trainer_modes.*PPOTrainer.{name} is not there"):
        compat.check(("verl",), ("monitor",), {"verl", "sync"})


def test_the_list_says_what_the_source_uses() -> None:
    script = runpy.run_path(str(ROOT / "docs/verl_list.py"))
    assert script["LIST"].read_text() == script["written"](), "run `python docs/verl_list.py`"


def test_what_the_list_says_is_imported_is_in_verl() -> None:
    for module, names in upstream.IMPORTS.items():
        if module.split(".")[0] == "verl" and not module.startswith(ENGINES):
            found = importlib.import_module(module)
            assert [name for name in names if not hasattr(found, name)] == [], module


def test_only_runs_that_ask_for_them_import_masks_and_megatron() -> None:
    apart = ("adapters.verl.sampling_mask", "adapters.verl.rollout.vllm_server", "adapters.verl.megatron")
    modules = ("driver.modes", "worker", "engine", "rollout.client", "rollout.replicas")
    imports = "; ".join(f"import mismatch_ext.adapters.verl.{module}" for module in modules)
    said = f"print([name for name in {apart!r} if f'mismatch_ext.{{name}}' in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"import sys; {imports}; {said}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
