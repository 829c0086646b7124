"""`mismatch-ext doctor` with real vLLM: a clean run and a fault, what it refuses, and the flags that it recommends."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from mismatch_ext.adapters import cli

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from mismatch_ext.config import MismatchConfig
from mismatch_ext.doctor import REMEDIES, Sample
from mismatch_ext.doctor.evidence import ALONE, DECODE
from tests.peers.engines.sglang_environment import PYTHON
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.scenarios_doctor")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(row["prompt"] for row in make_dataset(96, seed=5000)), encoding="utf-8")
    return path


@pytest.mark.engine
@pytest.mark.numeric
def test_a_clean_run_names_nothing_and_a_fault_is_named_confirmed_and_mended(run: Run, tmp_path: Path) -> None:
    found = run(scenarios.examined, out=str(tmp_path)).expect()
    clean, fault = found["clean"], found["fault"]
    assert (clean["status"], clean["verdict"], clean["causes"]) == (0, "clean", []), clean["printed"]
    assert (fault["status"], fault["verdict"]) == (1, "explained"), fault["printed"]
    (cause,) = fault["causes"]
    assert (cause["key"], cause["status"]) == ("temperature", "confirmed") and abs(cause["parameter"] - 0.9) < 0.005
    assert "to fix temperature:" in fault["printed"]
    # What the engine says of itself needs no list: a decode with other weights than the prefill's.
    rungs = {rung["name"]: rung["mean"] for rung in clean["rungs"] if rung["side"] == "engine"}
    assert set(rungs) == {DECODE, ALONE} and rungs[DECODE] < clean["gap"]["logp_abs_diff_mean"], rungs
    stale = found["stale_decode"]
    assert [(cause["key"], cause["status"]) for cause in stale["causes"]] == [("decode_path", "measured")]
    # Attention and MLP of each of the four layers, and the head.
    assert len(clean["blocks"]) == 9
    wrong = found["wrong_layer"]
    most = max(wrong["blocks"], key=lambda block: block["error"] / block["own"])
    assert (most["layer"], most["kind"], wrong["status"]) == (2, "mlp", 3), wrong["printed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "{tmp}/none"], ["--model", "none cannot be loaded"]),
        (["--prompts", "{tmp}/wrong.jsonl"], ["line 3", '"prompt_ids"']),
        (["--temperature", "0"], ["--temperature: 0.0 is not allowed"]),
        (["--prompts", "{tmp}/beyond.jsonl"], ["--prompts: token id 99 is beyond the vocabulary"]),
        (["--model", "{tmp}/damaged"], ["--model", "damaged cannot be loaded as a causal language model"]),
    ],
)
def test_what_cannot_be_examined_is_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "1+1="}\n\n{"text": "1+1="}\n')
    (tmp_path / "beyond.jsonl").write_text('{"prompt_ids": [3, 99]}\n')
    shutil.copytree(FOLDER / "dense", tmp_path / "damaged")
    (tmp_path / "damaged/model.safetensors").write_bytes(b"\0" * 64)
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    plain = ["--model", str(FOLDER / "dense"), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert cli.main(["doctor", *plain, *given]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ") and all(word in err for word in words), err


@pytest.mark.parametrize(
    ("version", "off", "verdict"),
    [(7, 0.0, "clean"), (7, 1e-7, "clean"), (6, 0.1, "clean"), (7, 0.1, "other_trainer")],
)
def test_a_log_whose_trainer_is_the_models_is_judged_at_its_temperature(
    version: int, off: float, verdict: str, tmp_path: Path
) -> None:
    from mismatch_ext.adapters.transformers.doctor.models import load_model
    from mismatch_ext.adapters.transformers.doctor.scorer import trainer_logprobs

    ids = {"prompt_ids": (3, 12, 4, 13), "response_ids": (3, 12)}  # the likeliest
    sample = Sample(
        prompts=(ids["prompt_ids"],) * 4, responses=(ids["response_ids"],) * 4, masks=((True, True),) * 4,
        logprobs=((0.0, 0.0),) * 4,
    )  # fmt: skip
    scored = trainer_logprobs(load_model(str(FOLDER / "dense")), sample, dtype="float32", temperature=0.8)[:2]
    line = ids | {"rollout_logprobs": scored.tolist(), "trainer_logprobs": (scored - off).tolist(), "step": 7}
    line |= {"provenance": {"dtype": "float32", "sampling": {"temperature": 0.8}, "weight_version": version}}
    log = tmp_path / "rollouts.jsonl"
    log.write_text(f"{json.dumps(line)}\n" * 4, encoding="utf-8")
    asked = ["doctor", "--model", str(FOLDER / "dense"), "--rollouts", str(log), "--quick", "--out", str(tmp_path)]
    assert cli.main(asked) == (3 if verdict == "other_trainer" else 0)
    written = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    said = "by the log's own trainer_logprobs" if off else "trainer_logprobs are the engine's to the last bit"
    assert written["verdict"] == verdict and any(said in note for note in written["notes"])


def test_no_two_responses_draw_with_the_same_noise() -> None:
    from mismatch_ext.adapters.vllm.doctor import seeded
    from vllm import SamplingParams

    each = seeded(SamplingParams(n=3, seed=5), 4)
    # vLLM seeds response i of a request by seed + i.
    assert [params.seed for params in each] == [5, 8, 11, 14]


def flags(lines: list[str]) -> set[str]:
    """Return the long options that lines name."""
    return {flag for line in lines for flag in re.findall(r"(?<!\S)(--[a-z][a-z0-9-]+)", line)}


def test_every_flag_for_vllm_is_vllms() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    named = flags([remedy.vllm for remedy in REMEDIES.values()])
    assert len(named) >= 6 and not [flag for flag in named if flag not in parser._option_string_actions]


def test_every_flag_for_sglang_is_sglangs() -> None:
    (source,) = PYTHON.parent.parent.glob("lib/python3*/site-packages/sglang/srt/server_args.py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (arguments,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"]
    fields = {
        f"--{node.target.id.replace('_', '-')}"
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    named = flags([remedy.sglang for remedy in REMEDIES.values()])
    assert len(named) >= 5 and not named - fields
    sampler = source.parent / "layers/sampler.py"
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in sampler.read_text(encoding="utf-8")


def test_every_override_for_verl_is_verls() -> None:
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    lines = [remedy.verl for remedy in REMEDIES.values() if remedy.verl and " " not in remedy.verl]
    assert len(set(lines)) >= 8
    with initialize_config_dir(str(Path(next(iter(verl.__path__))) / "trainer/config"), version_base=None):
        assert OmegaConf.select(compose("ppo_trainer"), "actor_rollout_ref.model.override_config") == {}
        for line in set(lines):
            key, _, value = line.lstrip("+").partition("=")
            config = compose("ppo_trainer", overrides=[line])
            if key.startswith("mismatch."):
                block = OmegaConf.to_container(config.mismatch)
                assert isinstance(block, dict) and MismatchConfig.parse(block)
            else:
                assert str(OmegaConf.select(config, key)).lower().replace("none", "null") == value, line


def test_every_setting_for_trl_is_trls() -> None:
    import yaml
    from trl import GRPOConfig, ModelConfig

    # A run's file holds both.
    known = {field.name for kind in (GRPOConfig, ModelConfig) for field in dataclasses.fields(kind)} | {"mismatch"}
    settings = [line for remedy in REMEDIES.values() if re.match(r"[a-z_]+: ", line := remedy.trl)]
    assert len(settings) >= 8
    for line in settings:
        found = yaml.safe_load(line.partition(", and")[0])
        assert set(found) <= known, line
        if "mismatch" in found:
            assert MismatchConfig.parse(found["mismatch"])
