"""Versions of TRL that nobody has run: what its loss computes decides, and not its text."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import requests

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError, SeamError
from mismatch_ext.seams import table
from tests.peers.scenarios import ROOT, Run, named
from tests.peers.trl.copies import ADDITIONS, HARMFUL, HARMLESS, copied

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_versions as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_versions")

ONE, DAPO = {"kl": {"coef": 0.1}}, "dapo"
BOTH = {**ONE, "correction": {"preset": "tis"}}
RATIO = 'inputs["importance_sampling_ratio"]\n'
MASK = "mask = completion_mask if"
KL_TERM = "per_token_loss = per_token_loss + self.beta"
KL_IN_LOSS = "if self.beta != 0.0:\n        per_token_loss"
OTHER_TOKENS = ("model,\n        input_ids,", "model,\n        completion_ids,")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that checks a block against TRL's loss with a part of its source replaced."""
    behavior = importlib.import_module("mismatch_ext.adapters.trl.behavior")
    stock = {kind: kind._compute_loss for kind in (behavior.GRPOTrainer, behavior.RLOOTrainer)}

    def check(old: str, new: str, block: dict[str, Any] = BOTH, loss: str = DAPO, kind: str = "GRPOTrainer") -> Any:
        trainer = getattr(behavior, kind)
        source, space = textwrap.dedent(inspect.getsource(stock[trainer])), dict(stock[trainer].__globals__)
        assert old in source
        exec(source.replace(old, new), space)
        monkeypatch.setattr(trainer, "_compute_loss", space["_compute_loss"])
        parsed = MismatchConfig.parse(block)
        assert parsed is not None
        return behavior.check_loss(trainer, parsed, loss)

    return check


@pytest.mark.parametrize("loss", ["grpo", "sapo", "bnpo", "dr_grpo", "cispo", "dapo", "vespo", "luspo"])
def test_a_loss_that_computes_the_same_is_accepted_whatever_its_text(check: Any, loss: str) -> None:
    check(MASK, "# A comment\n    mask = completion_mask if", loss=loss)
    check('"clip_ratio/', '"clipped/', loss=loss)
    check(MASK, "inputs = dict(inputs)\n    mask = completion_mask if", loss=loss)
    check("def _compute_loss(self, model, inputs)", "def _compute_loss(self, model, inputs, extra=None)", loss=loss)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("normalizer = inputs[", "normalizer = 2 * inputs[", ["denominator", "instead of"]),
        ("return loss\n", "return loss * mask.numel() / mask.sum()\n", ["denominator", "instead of"]),
        (RATIO, 'inputs["importance_sampling_ratio"] * 1.01\n', ["follows the policy gradient", "instead of"]),
        (RATIO, 'inputs["importance_sampling_ratio"] ** 2\n', ["multiplies each token's loss by", "instead of"]),
        (RATIO, 'inputs["importance_sampling_ratio"].clamp(min=0.5)\n', ["multiplies each token's loss by", "instead of"]),
        (RATIO, 'inputs["is_ratio"]\n', ["raises KeyError", "reads inputs['is_ratio']", "new"]),
        ("self.beta * per_token_kl", "self.beta * self.kl_scale * per_token_kl", ["kl_scale", "beta="]),
        ("self.beta * per_token_kl", "(self.beta if self.args.temperature else 0) * 2 * per_token_kl", ["denominator"]),
        ('if "tool_mask" not in inputs', "if True", ["denominator", "inputs.tool_mask"]),
        (*OTHER_TOKENS, ["scores other tokens"]),
    ],
)  # fmt: skip
def test_a_loss_that_lost_a_property_is_refused_by_what_it_no_longer_does(
    check: Any, old: str, new: str, words: list[str]
) -> None:
    with pytest.raises(SeamError) as refusal:
        check(old, new)
    assert all(word in str(refusal.value) for word in [*words, "mismatch.kl", "pip install trl=="]), refusal.value


@pytest.mark.parametrize(
    ("old", "new", "loss", "words"),
    [
        # A response without tokens, or with a single one, as masking leaves them.
        (".sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()", ".sum(-1) / mask.sum(-1)).mean()", "grpo", "instead of"),
        ("mask.sum(-1).clamp(min=1.0)).mean()", "mask.sum(-1).clamp(min=2.0)).mean()", "sapo", "denominator"),
        (".sum() / mask.sum().clamp(min=1.0)", ".sum() / mask.sum()", "bnpo", "denominator"),
        ('inputs["num_items_in_batch"].clamp(min=1.0)', 'inputs["num_items_in_batch"]', "dapo", "denominator"),
        # A KL term that TRL's own weights multiply.
        (KL_TERM, KL_TERM.replace("+ self.beta", '* 1 + inputs["importance_sampling_ratio"] * self.beta'), "dapo", "denominator"),
        (KL_IN_LOSS, KL_IN_LOSS.replace(":", " and entropy_mask is None:"), "luspo", "adds beta"),
        # The ratio of a whole response, which vespo has inside of a weight.
        ('ratio=inputs.get("importance_sampling_ratio")', "ratio=None", "vespo", "part of its ratio"),
        ("coef_1 - 1)) * 4", "coef_1.detach() - 1)) * coef_1 * 4", "sapo", "policy gradient"),
    ],
)  # fmt: skip
def test_properties_hold_in_cases_that_batches_rarely_have(
    check: Any, old: str, new: str, loss: str, words: str
) -> None:
    with pytest.raises(SeamError, match=rf"loss_type={loss!r}\) no longer .*{words}"):
        check(old, new, loss=loss)


@pytest.mark.parametrize(
    ("old", "new", "loss"),
    [
        ("return loss\n", "return loss + 1\n", DAPO),
        ("advantages * per_token_logps", "advantages * (per_token_logps - per_token_logps.detach())", "cispo"),
        ("advantages * per_token_logps", "advantages * (per_token_logps - per_token_logps.detach())", "vespo"),
        ("per_token_loss = -torch.min(", "per_token_loss = advantages - torch.min(", "grpo"),
    ],
)
def test_a_loss_of_another_value_is_accepted_if_it_has_the_same_slopes(
    check: Any, old: str, new: str, loss: str
) -> None:
    assert check(old, new, loss=loss) is None


CLAMPED = "clamped_ratios = torch.clamp(coef_1, max=self.epsilon_high).detach()"


@pytest.mark.parametrize(
    "new",
    [
        "clamped_ratios = torch.clamp(coef_1, max=self.epsilon_high)",
        "clamped_ratios = torch.clamp(coef_1**2, max=self.epsilon_high).detach()",
        "clamped_ratios = torch.clamp(1 + 0 * coef_1, max=self.epsilon_high).detach()",
        "clamped_ratios = coef_1.detach()",
    ],
)
def test_what_cispo_does_with_its_ratio_is_seen(check: Any, new: str) -> None:
    check(CLAMPED, new)  # other loss types have no such line
    with pytest.raises(SeamError, match="loss_type='cispo'.*no longer"):
        check(CLAMPED, new, loss="cispo")


@pytest.mark.parametrize("when", ["before the import", "after it"])
def test_a_loss_is_examined_in_the_hosts_memory_whatever_the_default_device_is(when: str) -> None:
    code = [
        "import torch",
        "from trl import GRPOTrainer",
        "from mismatch_ext.adapters.trl import behavior",
        "print(behavior.examine(GRPOTrainer, ['kl', 'correction'], 'dapo'))",
    ]
    code.insert(1 if when == "before the import" else 3, "torch.set_default_device('meta')")
    found = subprocess.run(
        [sys.executable, "-c", "; ".join(code)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert found.stdout.startswith("(None, None)"), found.stdout + found.stderr[-2000:]


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
@pytest.mark.parametrize(
    ("new", "named"),
    [
        ("if self.new_flag: raise ValueError\n    ", ["self.new_flag"]),
        ("if self._new_flag: raise ValueError\n    ", ["self._new_flag"]),
        ("if self.args.new_option: raise ValueError\n    ", ["self.args.new_option"]),
        ("if self.state.of_later: raise ValueError\n    ", ["self.state.of_later"]),
        ("if self.accelerator.is_main_process: raise ValueError\n    ", ["self.accelerator.is_main_process"]),
        (
            "self._metrics['train']['n'].append(self.accelerator.of_all(mask0).sum().item())\n    ",
            ["accelerator.of_all"],
        ),
        ("if 'new' in inputs: raise ValueError\n    ", ["inputs['new']"]),
        ("if inputs.get('new') is not None or self.flag: raise ValueError\n    ", ["inputs['new']", "self.flag"]),
    ],
)
def test_what_a_later_release_reads_beside_is_named_and_not_refused(
    check: Any, new: str, named: list[str], loss: str
) -> None:
    line = "    mask = completion_mask if"
    assert check(line, line, loss=loss) is None
    for block in (ONE, {"correction": {"preset": "tis"}}, {"sampling_mask": {}}, {"routing": {"mode": "R2"}}):
        added = check(line, f"    {new.replace('mask0', 'completion_mask')}mask = completion_mask if", block, loss)
        assert all(name in added for name in named), added
        assert (
            check(line, f"    {new.replace('mask0', 'completion_mask')}mask = completion_mask if", {"lr": {}}) is None
        )


def test_an_option_of_a_later_release_has_the_runs_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    behavior = importlib.import_module("mismatch_ext.adapters.trl.behavior")
    block = MismatchConfig.parse(ONE)
    assert block is not None
    source, space = (
        textwrap.dedent(inspect.getsource(behavior.GRPOTrainer._compute_loss)),
        dict(behavior.GRPOTrainer._compute_loss.__globals__),
    )
    exec(source.replace("return loss\n", "return loss * (2 if self.args.sync_ref_model else 1)\n"), space)
    monkeypatch.setattr(behavior.GRPOTrainer, "_compute_loss", space["_compute_loss"])
    options = behavior.GRPOConfig(output_dir="nowhere", bf16=False, use_cpu=True)
    assert "self.args.sync_ref_model" in behavior.check_loss(behavior.GRPOTrainer, block, DAPO, options)
    options.sync_ref_model = True
    with pytest.raises(SeamError, match=r"no longer .* instead of .*self.args.sync_ref_model, which is new"):
        behavior.check_loss(behavior.GRPOTrainer, block, DAPO, options)


def test_a_changed_loss_refuses_what_is_inside_of_it_alone(check: Any) -> None:
    doubled = ("normalizer = inputs[", "normalizer = 2 * inputs[")
    check(*doubled, {"lr": {}, "precision": {"dtype": "float16"}})
    check(*doubled, loss="grpo")  # a denominator of other loss types
    with pytest.raises(SeamError, match="no longer weighs tokens by the denominator"):
        check("* mask", "* mask * 2", {"correction": {"preset": "tis"}})
    for block in ({"sampling_mask": {}}, {"routing": {"mode": "R2"}}, {"routing": {"mode": "R3"}}):
        check("* mask", "* mask * 2", block)  # what is made of the scores is not theirs
        with pytest.raises(SeamError, match="scores other tokens"):
            check(*OTHER_TOKENS, block)
    check(
        "coef_1 * advantages", "advantages", {"routing": {"mode": "R2"}}, "", "RLOOTrainer"
    )  # no section has a term or a weight there
    with pytest.raises(SeamError, match="RLOOTrainer.*scores other tokens"):
        check(*OTHER_TOKENS, {"routing": {"mode": "R2"}}, "", "RLOOTrainer")


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
    assert set(overridden) == set(importlib.import_module("mismatch_ext.adapters.trl.seams").OVERRIDDEN)
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


def test_requests_to_a_server_keep_what_a_later_release_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    client = importlib.import_module("mismatch_ext.adapters.trl.server_client")
    heard: list[dict[str, Any]] = []

    class Session(requests.Session):
        def request(self, method: str, url: str, **given: Any) -> Any:  # type: ignore[override]
            heard.append({"method": method, "url": url, **given})
            answer = requests.Response()
            answer.status_code, answer._content = 200, b'{"data": []}'
            return answer

    host = type("Host", (), {"base_url": "http://127.0.0.1:1", "session": Session(), "_silence": 20.0})
    mine = object.__new__(client.client_of(lambda *_: None)(host))
    given: dict[str, Any] = {"headers": {"Authorization": "Bearer mine"}, "params": {"of": "it"}, "timeout": 3}
    body: dict[str, Any] = {"json": {"n": 1}, "files": {"image": b"1"}}
    mine._get(f"{mine.base_url}/v1/models", **given)
    mine._post(f"{mine.base_url}/start_weight_update", **given, **body)
    mine._post(f"{mine.base_url}/v1/completions", **given, **body)
    timeouts = [request.pop("timeout") for request in heard]
    assert [seconds for _, seconds in timeouts] == [3, 3, 3]
    sent = [(request.pop("method"), request.pop("url").removeprefix(mine.base_url)) for request in heard]
    assert sent == [("GET", "/v1/models"), ("POST", "/start_weight_update"), ("POST", "/v1/completions")]
    kept = {"headers": given["headers"], "params": given["params"], "allow_redirects": False}
    assert heard == [kept, kept | body, kept | body]
    mine._post(f"{mine.base_url}/v1/completions", json={})
    assert heard[-1]["timeout"][1] is None  # a generation may take any time
    for ask, options in ((mine._get, {"stream": True}), (mine._post, {"timeout": (3, 4)})):
        with pytest.raises(EngineError, match=rf"trl .* VLLMClient.{ask.__name__} for /x with {list(options)[0]}"):
            ask(f"{mine.base_url}/x", **options)
    assert len(heard) == 4


WITH_ENGINE = ("docstrings and comments", "a helper out of the loss")


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in WITH_ENGINE else pytest.mark.nightly) for n in HARMLESS]
)
def test_a_newer_version_that_computes_the_same_runs_every_section_with_one_warning(
    run: Run, moe: Path, tmp_path: Path, name: str
) -> None:
    copy = copied(tmp_path / "copy", HARMLESS[name])
    engine = name in (*WITH_ENGINE, "a keyword argument in each method")
    found = run(
        scenarios.newer, fresh=True, env={"PYTHONPATH": str(copy)}, model=moe, out=tmp_path / "run", timeout=300,
        engine=engine,
    ).expect()  # fmt: skip
    assert found["trl"].startswith(str(copy)) and found["refused"] == []
    assert all(found["moved"]) and len(found["moved"]) == (6 if engine else 4)
    assert len(found["untested"]) == 1 and "trl 1.18.2" in found["untested"][0]


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("name", HARMFUL)
def test_a_newer_version_whose_loss_computes_something_else_is_refused(
    run: Run, moe: Path, tmp_path: Path, name: str
) -> None:
    change, words = HARMFUL[name]
    copy = copied(tmp_path / "copy", change)
    found = run(
        scenarios.newer,
        fresh=True,
        env={"PYTHONPATH": str(copy)},
        model=moe,
        out=tmp_path / "run",
        timeout=300,
        engine=False,
    ).expect()
    assert found["trl"].startswith(str(copy))
    refused = [message for message in found["refused"] if "mismatch.correction" in message]
    assert refused and all(words in message for message in refused), found["refused"]


def examined(path: str) -> tuple[dict[str, str | None], dict[str, str], str]:
    """Return what `compat` finds of GRPO with a TRL first on the path: reasons and notes by feature, and KL's cells."""
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mismatch_ext", "compat", "--import"]
    done = subprocess.run(
        [*command, "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(done.stdout[done.stdout.index("{") :])
    host = "TRL GRPO + vLLM"
    cell = next(line for line in table(found).splitlines() if line.startswith("kl ")).removeprefix("kl")
    return found["hosts"][host], found["notes"][host], cell.lstrip()


@pytest.mark.engine
def test_compat_works_with_the_tested_trl_without_a_word() -> None:
    reasons, notes, cell = examined("")
    assert set(reasons.values()) == {None} and notes == {} and cell.startswith("holds  ")


INSIDE = {"kl", "correction", "sampling_mask", "routing.R2", "routing.R3"}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "compat", "trains"),
    [
        ("an option and an input that are off", "reads self.new_flag", True),
        pytest.param("an input that no batch has", "inputs['top_p_ratio']", True, marks=pytest.mark.nightly),
        ("an input of each batch", "inputs['top_p_ratio']", True),
        pytest.param("an input that it needs", None, False, marks=pytest.mark.nightly),
    ],
)
def test_what_a_newer_loss_reads_is_named_by_compat_and_counts_in_a_run(
    run: Run, dense: Path, tmp_path: Path, name: str, compat: str | None, trains: bool
) -> None:
    copy = str(copied(tmp_path / "copy", ADDITIONS[name]))
    reasons, notes, cell = examined(copy)
    outside = {reason for feature, reason in reasons.items() if feature not in INSIDE}
    assert outside == {None}
    if compat is None:
        assert notes == {} and "reads inputs['top_p_ratio'], which is new" in str(reasons["kl"])
        assert cell.startswith("no [")
    else:
        assert set(reasons.values()) == {None} and set(notes) == INSIDE
        assert all(compat in note and "trl 1.18.2" in note for note in notes.values())
        assert cell.startswith("holds [")
    found = run(
        scenarios.added, fresh=True, env={"PYTHONPATH": copy}, model=dense, out=tmp_path / "run", timeout=300
    ).expect()
    assert found["trl"].startswith(copy)
    # What is outside of the loss trains without a word, whatever TRL adds.
    assert found["lr"] == {"trained": True, "refused": None, "told": []}
    kl = found["kl"]
    if trains:
        assert kl["trained"] and compat is not None and [compat in said for said in kl["told"]] == [True]
    else:
        assert not kl["trained"] and "mismatch.kl" in kl["refused"] and "'top_p_ratio'" in kl["refused"]
