"""Runs of TRL with `vllm_mode="server"` against a real server, each in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import trl.generation.vllm_generation as generation
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, attach, engines
from mismatch_ext.adapters.trl.server_client import client_of
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import EngineError, MismatchError
from mismatch_ext.log_reading import read_run
from tests.oracle import expect_float32, watch_float32_error
from tests.peers.engines.vllm_server import processes, serving
from tests.peers.trl.ends import expect_ends, watch_ends
from tests.peers.trl.scenarios_training import arguments, graded, history, rows


def _arguments(out: str, url: str, **overrides: Any) -> dict[str, Any]:
    server = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 60.0}
    return arguments(out, **server | overrides)


def _build(model: str, out: str, url: str, block: Any, **overrides: Any) -> MismatchGRPOTrainer:
    args = MismatchGRPOConfig(**_arguments(out, url, mismatch=block, **overrides))
    return MismatchGRPOTrainer(model=model, reward_funcs=graded, args=args, train_dataset=rows())


def train(model: str, out: str, url: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train with a block."""
    trainer = _build(model, out, url, block, **overrides)
    exact = (block.get("precision") or {}).get("dtype") == "float32"
    errors = watch_float32_error(trainer) if exact else []
    verdicts: list[Any] = []
    verify = trainer.mm.checked.verifier.verify
    ends = watch_ends(trainer)

    def noted(*args: Any, **kwargs: Any) -> Any:
        verdicts.append(verify(*args, **kwargs))
        return verdicts[-1]

    trainer.mm.checked.verifier.verify = noted  # type: ignore[method-assign]
    trainer.train()
    return {
        "history": history(trainer),
        "float32_errors": errors,
        "ends": ends,
        "verdicts": [[verdict.status, verdict.message] for verdict in verdicts],
        "engine": vars(trainer.mm.checked.reading),
    }


def every_section(model: str, out: str, url: str) -> None:
    """Train in float32 with every section: both sides agree, and every update is verified."""
    block = {
        "precision": {"dtype": "float32"},
        "correction": {"preset": "token_truncate"},
        "kl": {"coef": 0.01},
        "lr": {},
        "routing": {"mode": "R3", "measured": 1.0},
    }
    found = train(model, out, url, block)
    expect_float32(found["history"], found["float32_errors"])
    # The first update is of what the server was started with.
    first, *later = found["verdicts"]
    assert first[0] == "unchanged" and [status for status, _ in later] == ["in_sync", "in_sync"]
    assert all("tensors are equal bit by bit" in message for _, message in later)
    # Experts are chosen by the engine, and in float32 the trainer would have chosen them, too.
    assert [step["mismatch/routing/set_mismatch_frac"] for step in found["history"]] == [0.0] * 3
    assert found["engine"]["model_dtype"] == found["engine"]["kv_cache_dtype"] == "float32"
    assert set(found["engine"]["parameter_dtypes"]) == {"float32"}
    expect_ends(found["ends"], 16)


def centered(model: str, out: str, url: str) -> None:
    """Train with score centering, and compare the first batch's heads with the trainer's own most likely tokens."""
    block = {"precision": {"dtype": "float32"}, "correction": {"centering": {"top_k": 6}}}
    trainer: Any = _build(model, out, url, block, temperature=0.8, max_steps=2)
    first = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    records: list[Any] = []
    keep = trainer.mm.centering.keep
    trainer.mm.centering.keep = lambda table, found: (records.append(found), keep(table, found))
    trainer.train()
    # Both sides compute in float32. A head of another place or row is off by whole nats.
    near = {"atol": 1e-3, "rtol": 0.0}
    for record in records[0]:
        prompt, answer = (torch.tensor(ids.tolist()) for ids in (record.prompt_ids, record.response_ids))
        with torch.no_grad():
            logits = first(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / trainer.temperature).log_softmax(-1)
        torch.testing.assert_close(logprobs.gather(1, record.head.ids.long()), record.head.logprobs, **near)
        # Equally likely tokens may change places, and their log-probabilities do not.
        torch.testing.assert_close(logprobs.topk(6).values, record.head.logprobs, **near)
        rollout = torch.tensor(record.rollout_logprobs.tolist())
        torch.testing.assert_close(logprobs.gather(1, answer[:, None])[:, 0], rollout, **near)
    assert all(step["mismatch/sampler_bias"] > 0 for step in history(trainer))
    # The server was started with vLLM's 20.
    with pytest.raises(
        MismatchError, match="(?s)it reports 20 at most.*--max-logprobs 128|--max-logprobs 128.*20 at most"
    ):
        _build(model, f"{out}/refused", url, {"correction": {"centering": {"top_k": 128}}})


def stock(model: str, out: str, url: str) -> None:
    """Train with stock GRPOTrainer, the same measured by `attach`, then with ours: without a block, and with {}.

    TRL's client reaches no CPU, so all of them have our transport; what else ours does, it does with a block alone.
    """
    found: dict[str, Any] = {}
    generation.VLLMClient = client_of(lambda remote, device: None)(generation.VLLMClient)  # type: ignore[misc]
    for name, trainer_class, config_class, block in (
        ("stock", GRPOTrainer, GRPOConfig, {}),
        ("attached", GRPOTrainer, GRPOConfig, {}),
        ("ours", MismatchGRPOTrainer, MismatchGRPOConfig, {}),
        ("measured", MismatchGRPOTrainer, MismatchGRPOConfig, {"mismatch": {}}),
    ):
        args = config_class(
            **_arguments(
                f"{out}/{name}", url, bf16=False, model_init_kwargs={"dtype": "float32"}, max_steps=2,
                generation_kwargs={"seed": 1}, **block,
            )
        )  # fmt: skip
        trainer: Any = trainer_class(model=model, reward_funcs=graded, args=args, train_dataset=rows())
        measured = attach(trainer) if name == "attached" else None
        trainer.train()
        found[name] = history(trainer)
        if measured is not None:
            assert measured.verdict is not None and measured.verdict.status == "in_sync"
    for step, own in enumerate(found["stock"]):
        for name in ("attached", "ours", "measured"):
            # The server forms batches as requests come in, and rounds by batches: tokens are the same, sums nearly.
            logged = {key: found[name][step][key] for key in own}
            assert logged == pytest.approx(own, rel=1e-3, abs=1e-5), name
        assert own["grad_norm"] > 0 and found["ours"][step].keys() == own.keys()
    for name in ("attached", "measured"):
        run = read_run(Path(out, name, "mismatch"))
        assert not any(event.name == "check_failed" for event in run.events)


class At(TrainerCallback):
    """Does something at the end of the first step."""

    def __init__(self, do: Any) -> None:
        self._do = do

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self._do()


@contextmanager
def _planted(fault: Any) -> Iterator[None]:
    """Send something else than the trainer's weights."""
    plain = RemoteEngine.send
    RemoteEngine.send = fault(plain)  # type: ignore[method-assign]
    try:
        yield
    finally:
        RemoteEngine.send = plain  # type: ignore[method-assign]


def outcome(do: Any) -> str:
    """Return how something ended: the error's class and message, or "went on"."""
    try:
        do()
    except Exception as error:  # noqa: BLE001  # any end of a run is one
        return f"{type(error).__name__}: {error}"
    return "went on"


def faults(model: str, out: str, url: str) -> None:
    """Plant faults between trainer and server, one after the other: each is named."""
    block = {"precision": {"dtype": "float32"}}
    found = {}

    def run(block: Any = block, at_end_of_step: Any = None, **overrides: Any) -> None:
        trainer = _build(model, f"{out}/{len(found)}", url, block, max_steps=2, **overrides)
        if at_end_of_step is not None:
            trainer.add_callback(At(lambda: at_end_of_step(trainer)))
        trainer.train()

    found["precision"] = outcome(lambda: run({"precision": {"dtype": "float16"}}))

    def after_the_first(instead: Any) -> Any:
        """Return a fault of every update but the first."""
        count = 0

        def fault(plain: Any) -> Any:
            def send(self: Any, parameters: Any) -> None:
                nonlocal count
                count += 1
                plain(self, parameters if count == 1 else instead(list(parameters)))

            return send

        return fault

    with _planted(after_the_first(lambda sent: [])):
        found["nothing"] = outcome(run)

    def overtake(trainer: Any) -> None:
        """Send weights as another trainer would."""
        other: Any = client_of(lambda remote, device: None)(generation.VLLMClient)(base_url=url)
        other.init_communicator("cpu")
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        other.update_model_params(weights)

    found["other trainer"] = outcome(lambda: run(at_end_of_step=overtake))

    def break_off(trainer: Any) -> None:
        """Let the next update end when it has begun."""

        def post(path: str, body: Any = None) -> Any:
            if path == "/start_weight_update":
                raise ConnectionError("planted")
            return plain(path, body)

        http = trainer.vllm_generation.vllm_client.http
        plain, http.post = http.post, post

    found["broken off"] = outcome(lambda: run(at_end_of_step=break_off))
    found["after it"] = outcome(run)
    _Client = client_of(lambda remote, device: None)(generation.VLLMClient)
    client: Any = _Client(base_url=url)
    RemoteEngine(client.http).weight_version = "default"  # in truth no layer was touched

    below = processes(url)[1:]

    def hang(trainer: Any) -> None:
        """Let the engine stop while it generates; the process before it goes on answering /health."""

        def generate(path: str, body: Any) -> Any:
            for process in below:
                os.kill(process, signal.SIGSTOP)
            return plain(path, body)

        http = trainer.vllm_generation.vllm_client.http
        plain, http.generate = http.generate, generate

    try:
        found["hung"] = outcome(lambda: run(at_end_of_step=hang, vllm_server_timeout=5.0))
    finally:
        for process in below:
            os.kill(process, signal.SIGCONT)

    def keep_decode(trainer: Any) -> None:
        """Let the server's workers decode with what they have now, and prefill with what they get."""
        trainer.vllm_generation.vllm_client.http.rpc("keep_decode")

    found["stale decode"] = outcome(lambda: run(at_end_of_step=keep_decode, learning_rate=1e-2))
    client.http.rpc("mend_decode")
    # Last, because what vLLM decodes with the next good weights can still be NaN, from what its KV cache was left with.
    with _planted(after_the_first(lambda sent: [(name, values * torch.nan) for name, values in sent])):
        found["nan"] = outcome(run)
    found["after nan"] = outcome(run)
    for fault, words in {
        "precision": ["EngineError", "--dtype float16", "it computes in float32"],
        "nothing": ["WeightSyncError", "stale"],
        "nan": ["WeightSyncError", "garbled", "not finite"],
        "other trainer": ["EngineError", "another trainer"],
        "broken off": ["ConnectionError", "planted"],  # the host's own
        "after it": ["EngineError", "failed half-way", "Restart it"],
        "hung": ["EngineError", "did not answer", "within 5 s"],
        "stale decode": ["WeightSyncError", "decode path does not compute with the weights that its prefill has"],
    }.items():
        assert all(word in found[fault] for word in words), (fault, found[fault])
    # Whether its KV cache still holds NaN where the next run decodes is up to vLLM.
    assert found["after nan"] == "went on" or "decoded tokens are not finite" in found["after nan"], found["after nan"]


@contextmanager
def _stopped(engine: list[int]) -> Iterator[None]:
    """Stop the engine's processes for a while; the server in front of them goes on."""
    for process in engine:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in engine:
            os.kill(process, signal.SIGCONT)


def unanswered(model: str, out: str, url: str) -> None:
    """Train on a server whose engine is busy when the probes of three updates in a row come."""
    trainer = _build(model, out, url, {"precision": {"dtype": "float32"}}, max_steps=6)
    checked, engine = trainer.mm.checked, processes(url)[1:]
    decode, post, verify = checked.engine.remote.decode, checked.engine.remote.http.post, checked.verifier.verify
    verdicts, priorities = list[Any](), list[Any]()

    def decoded(*args: Any, **kwargs: Any) -> Any:
        busy = 2 <= checked.weight_version <= 4
        with _stopped(engine) if busy else nullcontext():
            return decode(*args, **kwargs)

    def posted(path: str, body: Any = None, **options: Any) -> Any:
        if path == "/v1/completions":
            priorities.append(body.get("priority"))
        return post(path, body, **options)

    def noted(*args: Any, **kwargs: Any) -> Any:
        verdict = verify(*args, **kwargs)
        verdicts.append(None if verdict is None else verdict.status)
        return verdict

    checked.engine.remote.decode, checked.engine.remote.http.post = decoded, posted
    checked.verifier.verify = noted
    with mock.patch.object(engines, "PROBE_SECONDS", 3.0):
        trainer.train()
    assert trainer.state.global_step == 6
    # The server may hold the weights that an earlier test has sent.
    assert verdicts[0] in ("unchanged", "in_sync") and verdicts[1:] == [None, None, None, "in_sync", "in_sync"]
    events = read_run(Path(out, "mismatch")).events
    said = [event.message for event in events if event.name == "weight_sync_unanswered"]
    assert len(said) == 3
    assert all("nothing is known of this weight update" in message and "within 3 s" in message for message in said)
    # The server orders requests by priority: the probes' come first.
    assert len(set(priorities)) == 2 and None in priorities


def restarted(model: str, out: str, url: str, flags: list[str]) -> None:
    """Restart the server between two steps, without this package in it, and begin another run."""
    block = {"precision": {"dtype": "float32"}}
    port = int(url.rpartition(":")[2])
    with ExitStack() as stack:

        def restart() -> None:
            os.killpg(processes(url)[0], signal.SIGKILL)
            again = serving(model, Path(out), *flags, development=True, port=port, plugins="")
            stack.enter_context(again)

        trainer = _build(model, f"{out}/restarted", url, block, max_steps=2)
        trainer.add_callback(At(restart))
        with pytest.raises(EngineError, match="was restarted"):
            trainer.train()
        without_plugin = '--weight-transfer-config .{"backend": "mismatch_http"}'
        with pytest.raises(MismatchError, match=without_plugin):
            _build(model, f"{out}/plain", url, {**block, "routing": {"mode": "R3"}})
