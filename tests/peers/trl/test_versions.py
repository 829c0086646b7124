"""Versions of TRL that nobody has run: what its loss computes decides, and not its text."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import SeamError
from tests.peers.scenarios import Run, named
from tests.peers.trl.copies import HARMFUL, HARMLESS, copied

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_versions as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_versions")

ONE, DAPO = {"kl": {"coef": 0.1}}, "dapo"
RATIO = 'inputs["importance_sampling_ratio"]\n'
MASK = "mask = completion_mask if"
OTHER_TOKENS = ("model,\n        input_ids,", "model,\n        completion_ids,")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that checks a block against TRL's loss with a part of its source replaced."""
    behavior = importlib.import_module("mismatch_ext.adapters.trl.behavior")
    stock = {kind: kind._compute_loss for kind in (behavior.GRPOTrainer, behavior.RLOOTrainer)}

    def check(old: str, new: str, block: dict[str, Any] = ONE, loss: str = DAPO, kind: str = "GRPOTrainer") -> None:
        trainer = getattr(behavior, kind)
        source, space = textwrap.dedent(inspect.getsource(stock[trainer])), dict(stock[trainer].__globals__)
        assert old in source
        exec(source.replace(old, new), space)
        monkeypatch.setattr(trainer, "_compute_loss", space["_compute_loss"])
        parsed = MismatchConfig.parse(block)
        assert parsed is not None
        behavior.check_loss(trainer, parsed, loss)

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
        ("normalizer = inputs[", "normalizer = 2 * inputs[", ["comes to", "instead of"]),
        ("return loss\n", "return loss * mask.numel() / mask.sum()\n", ["comes to", "instead of"]),
        (RATIO, 'inputs["importance_sampling_ratio"] * 1.01\n', ["comes to", "instead of"]),
        (RATIO, 'inputs["is_ratio"]\n', ["reads 'is_ratio'", "new"]),
        (MASK, 'mask = inputs.get("weights", completion_mask) if', ["reads 'weights'", "new"]),
        ("self.beta * per_token_kl", "self.beta * self.kl_scale * per_token_kl", ["kl_scale", "beta=0.1"]),
        ("max=self.args.delta", "max=1 + self.args.delta", ["args.delta=1.1", "comes to"]),
        ('if "tool_mask" not in inputs', "if True", ["tool_mask", "comes to"]),
        ("entropy_mask\n\n", "1\n\n", ["top_entropy_quantile=0.5", "comes to"]),
        (*OTHER_TOKENS, ["scores other tokens"]),
    ],
)  # fmt: skip
def test_a_loss_that_computes_something_else_is_refused_by_what_was_seen(
    check: Any, old: str, new: str, words: list[str]
) -> None:
    with pytest.raises(SeamError) as refusal:
        check(old, new)
    assert all(word in str(refusal.value) for word in [*words, "mismatch.kl", "pip install trl=="]), refusal.value


def test_a_changed_loss_refuses_what_is_inside_of_it_alone(check: Any) -> None:
    doubled = ("normalizer = inputs[", "normalizer = 2 * inputs[")
    check(*doubled, {"lr": {}, "precision": {"dtype": "float16"}})
    check(*doubled, loss="grpo")  # a denominator of other loss types
    with pytest.raises(SeamError, match="comes to"):
        check("* mask", "* mask * 2", {"correction": {"preset": "tis"}})
    for block in ({"sampling_mask": {}}, {"routing": {"mode": "R2"}}, {"routing": {"mode": "R3"}}):
        check("* mask", "* mask * 2", block)  # what is made of the scores is not theirs
        with pytest.raises(SeamError, match="scores other tokens"):
            check(*OTHER_TOKENS, block)
    with pytest.raises(SeamError, match="RLOOTrainer.*comes to"):
        check("coef_1 * advantages", "advantages", ONE, "", "RLOOTrainer")


def test_overrides_pass_on_what_a_later_release_adds() -> None:
    trainer = importlib.import_module("mismatch_ext.adapters.trl.trainer")
    overridden = {
        name: method
        for name, method in vars(trainer.MismatchTrainerMixin).items()
        if inspect.isfunction(method) and name != "__init__"
    }
    heard: list[Any] = []
    host = type("Host", (), dict.fromkeys(overridden, lambda self, *_, **named: heard.append(named)))
    mine = object.__new__(type("Mine", (trainer.MismatchTrainerMixin, host), {}))
    assert overridden
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
