"""Versions of TRL that nobody has run: what its loss computes decides, and not its text."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import runpy
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import SeamError
from tests.peers.scenarios import ROOT, Run, named
from tests.peers.trl.copies import AN_INPUT_OF_EACH_BATCH, HARMLESS, copied

scenarios = named("tests.peers.trl.scenarios_versions")

DAPO = "dapo"
BOTH = {"kl": {"coef": 0.1}, "correction": {"preset": "tis"}}
CHANGED = tomllib.loads((ROOT / "tests/data/trl/changed_losses.toml").read_text(encoding="utf-8"))["changed"]
SLOW: dict[str, Any] = {
    name: pytest.mark.nightly if name == "a keyword argument in each method" else () for name in HARMLESS
}


def test_overrides_pass_on_what_a_later_release_adds() -> None:
    trainer = importlib.import_module("mismatch_ext.adapters.trl.trainer")
    overridden = {
        name: method
        for name, method in vars(trainer.MismatchTrainerMixin).items()
        if inspect.isfunction(method) and name != "__init__"
    }
    heard: list[Any] = []
    host = type("Host", (), dict.fromkeys(overridden, lambda self, *_, **named: heard.append(named)))
    mine: Any = object.__new__(type("Mine", (trainer.MismatchTrainerMixin, host), {}))
    mine.args = None
    measured, stepped, *_ = importlib.import_module("mismatch_ext.adapters.trl.upstream").LIST["hook"]
    names = {name.rpartition(".")[2].partition("(")[0] for name in (*measured["names"], *stepped["names"])}
    assert set(overridden) == names
    for name, method in overridden.items():
        needed = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
        positional = [None for one in needed[1:] if one.kind is one.POSITIONAL_OR_KEYWORD]
        getattr(mine, name)(*positional, of_a_later_release=True)
        assert heard.pop() == {"of_a_later_release": True}, name


def test_the_server_clients_overrides_do_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    client = importlib.import_module("mismatch_ext.adapters.trl.server_client")
    monkeypatch.setattr(client, "RemoteEngine", lambda _: SimpleNamespace(backend="nccl"))
    monkeypatch.setattr(client, "is_fresh", lambda _: True)
    monkeypatch.setattr(client.CheckedClient, "expect_own_weights", lambda _: None)
    heard: list[Any] = []
    given = {"init_communicator": (), "update_named_params": ({}, iter(())), "_start_weight_update": ()}
    host = type("Host", (), dict.fromkeys(given, lambda self, *_, **named: heard.append(named)))
    mine = object.__new__(client.client_of(lambda *_: None)(host))
    vars(mine).update(http=None, stamps=client.Stamps())
    for name, arguments in given.items():
        getattr(mine, name)(*arguments, of_a_later_release=True)
        assert heard.pop() == {"of_a_later_release": True}, name


def test_the_list_says_what_the_source_uses_and_trl_has_it() -> None:
    script = runpy.run_path(str(ROOT / "docs/trl_list.py"))
    assert script["LIST"].read_text() == script["written"](), "run `python docs/trl_list.py`"
    upstream = importlib.import_module("mismatch_ext.adapters.trl.upstream")
    for name in upstream.LIST["imports"]:
        module, _, attribute = name.partition(":")
        if not module.startswith("vllm"):  # whose engine takes long to import
            assert hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(
                f"{module}.{attribute}"
            ), name
    trainers = importlib.import_module("trl")
    kinds = {*trainers.GRPOTrainer.__mro__, *trainers.RLOOTrainer.__mro__} - {object}
    source = "".join(inspect.getsource(kind) for kind in kinds)
    ours = {"mm", "__mro__"}
    assert [name for name in upstream.LIST["reads"]["trainer"].keys() - ours if name not in source] == []
    batches = "".join(inspect.getsource(kind) for kind in (trainers.GRPOTrainer, trainers.RLOOTrainer))
    of_vllm = {"num_cached_tokens"}
    assert [key for key in upstream.LIST["reads"]["batch"].keys() - of_vllm if f'"{key}"' not in batches] == []


def test_a_trl_without_a_method_is_refused_by_name_by_the_sections_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compat = importlib.import_module("mismatch_ext.adapters.compat")
    trainer = importlib.import_module("trl").GRPOTrainer
    here = {"trl", "GRPOTrainer"}
    monkeypatch.delattr(trainer, "_calculate_rewards")
    compat.check(("trl",), ("monitor", "monitor.weight_sync"), here)  # `mismatch={}` has no part in rewards
    with pytest.raises(SeamError, match=r"mismatch.lr: .*GRPOTrainer._calculate_rewards is not there"):
        compat.check(("trl",), ("monitor", "lr"), here)
    monkeypatch.delattr(trainer, "_generate")
    with pytest.raises(SeamError, match=r"the mismatch block: .*GRPOTrainer._generate is not there"):
        compat.check(("trl",), ("monitor",), here)


@pytest.fixture
def changed_loss(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that replaces a part of the source of a trainer's loss."""
    behavior = importlib.import_module("mismatch_ext.adapters.trl.behavior")

    def change(old: str, new: str, kind: str = "GRPOTrainer") -> Any:
        trainer = getattr(behavior, kind)
        source = textwrap.dedent(inspect.getsource(trainer._compute_loss))
        space = dict(trainer._compute_loss.__globals__)
        assert old in source
        exec(source.replace(old, new), space)
        monkeypatch.setattr(trainer, "_compute_loss", space["_compute_loss"])
        return behavior, trainer

    return change


@pytest.mark.parametrize("row", CHANGED, ids=lambda row: row["why"])
def test_what_a_changed_loss_computes_decides_and_not_its_text(changed_loss: Any, row: dict[str, Any]) -> None:
    behavior, trainer = changed_loss(row["old"], row["new"], row.get("kind", "GRPOTrainer"))
    block = MismatchConfig.parse(row.get("block", BOTH))
    for loss in row.get("losses", [DAPO]):
        if "words" in row:
            with pytest.raises(SeamError) as refusal:
                behavior.check_loss(trainer, block, loss)
            assert all(word in str(refusal.value) for word in row["words"]), refusal.value
            continue
        note = behavior.check_loss(trainer, block, loss)
        assert (note is None) == ("named" not in row), note
        assert all(name in note for name in row.get("named", [])), note


def test_an_option_of_a_later_release_has_the_runs_own_value(changed_loss: Any) -> None:
    option = "return loss * (2 if self.args.sync_ref_model else 1)\n"
    behavior, trainer = changed_loss("return loss\n", option)
    block = MismatchConfig.parse({"kl": {"coef": 0.1}})
    options = behavior.GRPOConfig(output_dir="nowhere", bf16=False, use_cpu=True)
    assert "self.args.sync_ref_model" in behavior.check_loss(trainer, block, DAPO, options)
    options.sync_ref_model = True
    with pytest.raises(SeamError, match=r"no longer .* instead of .*self.args.sync_ref_model, which is new"):
        behavior.check_loss(trainer, block, DAPO, options)


def test_a_loss_is_examined_in_the_hosts_memory_whatever_the_default_device_is() -> None:
    code = (
        "import torch; torch.set_default_device('meta'); from trl import GRPOTrainer; "
        "from mismatch_ext.adapters.trl import behavior; print(behavior.examine(GRPOTrainer, ['kl', 'correction'], 'dapo'))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.stdout.startswith("(None, None)"), found.stdout + found.stderr[-2000:]


@pytest.mark.engine
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in SLOW.items()])
def test_a_newer_version_that_computes_the_same_runs_every_section_with_one_warning(
    run: Run, moe: Path, tmp_path: Path, name: str
) -> None:
    copy = str(copied(tmp_path / "copy", HARMLESS[name]))
    run(
        scenarios.newer, fresh=True, env={"PYTHONPATH": copy}, model=moe, out=tmp_path / "run", copy=copy, timeout=300
    ).expect()


@pytest.mark.engine
def test_what_a_newer_loss_reads_is_named_by_compat_and_in_a_run(run: Run, dense: Path, tmp_path: Path) -> None:
    copy = str(copied(tmp_path / "copy", AN_INPUT_OF_EACH_BATCH))
    environment = {**os.environ, "PYTHONPATH": copy, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mismatch_ext", "compat", "--import", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    host = "TRL GRPO + vLLM"
    assert set(found["hosts"][host].values()) == {None}
    notes = found["notes"][host]
    assert set(notes) == {"kl", "correction", "sampling_mask", "routing.R2", "routing.R3"}
    assert all("inputs['top_p_ratio']" in note and "trl 1.18.2" in note for note in notes.values())
    run(
        scenarios.added, fresh=True, env={"PYTHONPATH": copy}, model=dense, out=tmp_path / "run", copy=copy, timeout=300
    ).expect()
