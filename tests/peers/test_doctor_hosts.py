"""The doctor's settings of a TRL or verl run, held against what the installed host gives its engine; and prompts of data sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from mismatch_ext.adapters import cli

from examples.arithmetic.shipped import FOLDER
from mismatch_ext.errors import ConfigError
from tests.peers.scenarios import Run, named

trl_scenarios = named("tests.peers.trl.scenarios_doctor")
verl_scenarios = named("tests.peers.verl.scenarios_doctor")

# What TRL or verl says for its own processes, and what asks of the doctor's: a whole response is scored, with one token more.
OWN = {"model", "enable_sleep_mode", "distributed_executor_backend", "seed", "max_model_len"}
# TRL passes a quantization only of weights that bitsandbytes holds, which the doctor refuses.
OF_TRL = {"quantization"}


def test_a_run_of_trl_starts_as_trl_starts_it(run: Run, tmp_path: Path) -> None:
    found = run(trl_scenarios.trl_passes, out=str(tmp_path)).expect()
    read, passed = found["read"]["run"], found["passed"]
    left = {name: value for name, value in passed.items() if name not in OWN | OF_TRL}
    assert {name: read["arguments"][name] for name in left} == left
    assert set(read["arguments"]) - set(left) == {"max_model_len", "generation_config"}
    assert (passed["max_model_len"], read["arguments"]["max_model_len"]) == (96, 97)
    assert passed["model"] == read["model"] and "dtype" not in passed
    assert found["sampling"]["trl"] == found["sampling"]["doctor"]
    assert f"torch.{read['trainer_weights']}" == found["weights"]
    assert (read["trainer_dtype"], read["dtype"]) == ("float32", "bfloat16")  # vLLM's own, for a float32 checkpoint
    assert read["temperature"] == 0.9 and read["layout"] == "left"
    assert (found["block"]["dtype"], found["block"]["trainer_dtype"], found["block"]["head"]) == (
        "float16", "float16", "float32",
    )  # fmt: skip
    assert found["read"]["max_tokens"] == 24 and found["read"]["dataset"]["paths"] == ["rows.jsonl"]


@pytest.mark.nightly
def test_a_run_of_verl_starts_as_verls_server_starts_it(run: Run, tmp_path: Path) -> None:
    found = run(verl_scenarios.verl_passes, out=str(tmp_path)).expect()
    read, passed = found["read"]["run"], found["passed"]
    given = {name: value for name, value in read["arguments"].items() if name not in ("max_model_len",)}
    assert given.pop("generation_config") == passed["generation_config"] == "auto"
    assert {name: passed[name] for name in given} == given and len(given) > 10
    assert (passed["max_model_len"], read["arguments"]["max_model_len"]) == (96, 97)
    assert passed["dtype"] == read["dtype"] == "float16" and passed["model"] == read["model"]
    assert read["trainer_dtype"] == read["trainer_weights"] == "bfloat16"
    assert found["trainer"] == found["override"] == 0.002 and read["layout"] == "packed"
    block = found["block"]
    assert block["replays"] and block["trainer_dtype"] == block["trainer_weights"] == block["dtype"] == "float16"
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 8, "repetition_penalty": 1.0, "ignore_eos": False}
    assert found["requests"].pop("logprobs") is True and read["sampling"] == sampling == found["requests"]
    assert found["read"]["dataset"]["paths"] == ["/nowhere/train.parquet"] and found["read"]["max_tokens"] == 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trl", "{tmp}/none.yaml"], ["--trl", "none.yaml cannot be read"]),
        (["--trl", "{tmp}/wrong.yaml"], ["--trl: TRL refuses", "temperature"]),
        (["--trl", "{tmp}/server.yaml"], ["server.yaml: vllm_mode='server'", "--server"]),
        (["--trl", "{tmp}/plain.yaml"], ["names no data set", "--prompts"]),
        (["--verl", "nothing.of.it=1"], ["--verl", "nothing"]),
        (["--trl", "{tmp}/small.yaml"], ["--trl: small.yaml: model_name_or_path: dense cannot be loaded"]),
        (["--verl", "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.model.path=x"], ["rollout.name='hf'"]),
        (["--trl", "{tmp}/plain.yaml", "--dataset", "{tmp}/rows.jsonl"], ["no column 'prompt', but question"]),
    ],
)
def test_what_a_host_cannot_have_meant_is_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nuse_vllm: true\nvllm_mode: "
    plain = f"model_name_or_path: {FOLDER / 'dense'}\n{settings}"
    (tmp_path / "plain.yaml").write_text(plain + "colocate\n")
    # A name that a script of the run's own knows, of a run on a GPU.
    (tmp_path / "small.yaml").write_text("model_name_or_path: dense\nuse_vllm: true\nvllm_mode: colocate\n")
    (tmp_path / "server.yaml").write_text(plain + "server\n")
    (tmp_path / "wrong.yaml").write_text(plain + "colocate\ntemperature: warm\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1="}\n')
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    assert cli.main(["doctor", *given, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ") and all(word in err for word in words), err


CHAT = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}{% if twice is defined %}={% endif %}"
)


def test_messages_are_encoded_by_the_chat_template_and_long_prompts_left_out(tmp_path: Path) -> None:
    from datasets import Dataset as Rows
    from mismatch_ext.adapters.doctor.datasets import read_dataset, with_own
    from mismatch_ext.adapters.doctor.hosts import Dataset
    from transformers import AutoTokenizer

    model = str(FOLDER / "dense")
    tokenizer = AutoTokenizer.from_pretrained(model)
    sums = ["1+1", "12+34+56", "2+3"]
    rows = Rows.from_list([{"prompt": [{"role": "user", "content": text}]} for text in sums])
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    host = Dataset(
        paths=("elsewhere.parquet",), option="data.train_files", template=CHAT, template_arguments={"twice": 1},
        longest=len(tokenizer("1+1==")["input_ids"]),
    )  # fmt: skip
    expected = [list(tokenizer(f"{text}==", add_special_tokens=False)["input_ids"]) for text in ("1+1", "2+3")]
    assert read_dataset(with_own(host, str(tmp_path / "rows.parquet")), model, 8) == expected
    with pytest.raises(
        ConfigError, match="row 0: the chat template cannot be applied.* Write the prompts to a file for --prompts.$"
    ):
        read_dataset(with_own(None, str(tmp_path / "rows.parquet")), model, 8)
