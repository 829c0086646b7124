"""The shipped checkpoints: those of the standard recipes, whole, and refused when they are not what was committed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic import pretrain, shipped
from examples.arithmetic.pretrain import ensure_model, recipe_key
from examples.arithmetic.recipe import RECIPES
from examples.arithmetic.shipped import FOLDER, DamagedModelError, check, ship, shipped_model
from tests.unit.test_arithmetic_task import TWO_STEPS


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the shipped dense checkpoint, which stands in its place."""
    shutil.copytree(FOLDER, tmp_path / "models")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "models")
    return tmp_path / "models/dense"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_standard_recipe_is_shipped_and_nothing_is_trained(kind: str, tmp_path: Path) -> None:
    path = ensure_model(kind, tmp_path / "cache")
    assert path == FOLDER / kind and not (tmp_path / "cache").exists()
    model = AutoModelForCausalLM.from_pretrained(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) > 500_000


def test_it_is_said_which_model_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensure_model("dense", tmp_path)
    said = capsys.readouterr().err
    assert f"shipped: {FOLDER / 'dense'}" in said and "595,328 parameters" in said


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_sums_are_sha256sums_and_cover_every_file(kind: str) -> None:
    subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=FOLDER / kind, check=True, capture_output=True
    )
    listed = {line.split("  ")[1] for line in (FOLDER / kind / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in (FOLDER / kind).iterdir()} - {"SHA256SUMS"}
    assert {"model.safetensors", "config.json", "training.json"} <= listed


def test_together_they_are_ten_megabytes_at_most() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 10_000_000


@pytest.mark.parametrize("changed", [{"steps": 2}, {"seed": 1}])
def test_another_recipe_is_not_the_shipped_one(changed: dict[str, int]) -> None:
    assert shipped_model("dense", recipe_key(RECIPES["dense"])) == FOLDER / "dense"
    assert shipped_model("dense", recipe_key(replace(RECIPES["dense"], **changed))) is None


def test_anew_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "dense", TWO_STEPS["dense"])
    assert ensure_model("dense", tmp_path, threads=1, progress=False, anew=True).parent == tmp_path


def test_a_changed_training_loop_is_another_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "LOOP_REVISION", pretrain.LOOP_REVISION + 1)
    assert shipped_model("dense", recipe_key(RECIPES["dense"])) is None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "training.json", "tokenizer.json"])
def test_a_damaged_file_is_an_error_that_says_what_to_do(copy: Path, tmp_path: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[-2] ^= 1
    (copy / name).write_bytes(bytes(data))
    with pytest.raises(DamagedModelError) as error:
        ensure_model("dense", tmp_path / "cache", progress=False)
    assert str(copy / name) in str(error.value) and f"git checkout -- {copy / name}" in str(error.value)
    assert "--train" in str(error.value) and not (tmp_path / "cache").exists()


def test_a_pointer_of_git_lfs_is_named(copy: Path) -> None:
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2386224\n")
    with pytest.raises(DamagedModelError, match="pointer of Git LFS.*git lfs pull"):
        check(copy)


@pytest.mark.parametrize("name", ["model.safetensors", "SHA256SUMS"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(DamagedModelError, match=f"{name}.*git checkout"):
        shipped_model("dense", recipe_key(RECIPES["dense"]))


def test_shipping_writes_command_and_sums(copy: Path, tmp_path: Path) -> None:
    trained = ensure_model("dense", tmp_path / "cache", recipe=TWO_STEPS["dense"], threads=1, progress=False)
    folder = ship(trained, "dense", "the command")
    assert folder == copy
    check(folder)
    assert shipped_model("dense", recipe_key(TWO_STEPS["dense"])) == folder
    assert '"command": "the command"' in (folder / "training.json").read_text()
