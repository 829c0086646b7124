"""Real SGLang engines on a CPU, in an environment that has SGLang.

Models are random and tiny. In float32, engine and transformers must agree on every token; in half precision they cannot.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.sglang import (
    check_server,
    generate_request,
    read_server,
    to_provenance,
    to_records,
)
from mismatch_ext.adapters.sglang.engine import EngineTransport, HttpTransport, Transport
from mismatch_ext.adapters.sglang.probes import score_tokens
from mismatch_ext.adapters.sglang.side import Rollout
from mismatch_ext.adapters.sglang.weights import update_weights
from mismatch_ext.adapters.transformers import checkpoint_parameters, scoring
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import MismatchError
from mismatch_ext.rollout import RolloutRecord, SamplingSettings
from mismatch_ext.routing import agreement, align
from mismatch_ext.weights import NamedTensors
from tests.oracle import float32_error
from tests.peers.engines.scenarios_conformance import PROBES, Verified, updated
from tests.peers.engines.served import answering
from tests.rendezvous import free_port

# The share of memory is no reservation, max_total_tokens is; a small one fails when others take memory during the start.
OPTIONS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True,
    "mem_fraction_static": 0.5, "max_total_tokens": 4096, "max_running_requests": 8, "chunked_prefill_size": 64,
    "skip_server_warmup": True, "grammar_backend": "none", "log_level": "error", "random_seed": 1, "watchdog_timeout": 250,
    "skip_tokenizer_init": True, "enable_return_routed_experts": True, "sleep_on_idle": True,
}  # fmt: skip
PLAIN = SamplingSettings()


@contextmanager
def running(model: str, dtype: str, way: str, **changes: Any) -> Iterator[Transport]:
    """Run an engine in this process's family, or a server behind HTTP."""
    options = {**OPTIONS, "model_path": model, "dtype": dtype, **changes}
    if way == "engine":
        from sglang import Engine

        engine = Engine(**options)
        try:
            yield EngineTransport(engine)
        finally:
            engine.shutdown()
        return
    # 0.5.12 takes a second port, 10,000 above.
    port = free_port()
    flags: list[str] = []
    for name, value in {**options, "host": "127.0.0.1", "port": port}.items():
        if value is not False:
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    log = Path(model).parent / f"server-{port}.log"
    with answering(command, port, os.environ, log) as url:
        yield HttpTransport(url)


def prompts(count: int, longest: int, seed: int, vocabulary: int = 16, shortest: int = 2) -> list[list[int]]:
    """Return random prompts of many lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(shortest, longest, count).round().int().tolist()
    return [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def padded(records: list[RolloutRecord]) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask `[B, S]`, padded on the right."""
    rows = [torch.tensor([*r.prompt_ids, *r.response_ids]) for r in records]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True), pad([torch.ones_like(row) for row in rows], True)


@torch.no_grad()
def trainer_scores(model: nn.Module, tokens: Tensor, attention: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the trainer's log-probabilities `[B, S-1]` of tokens 1 to S-1."""
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def gaps(
    model: nn.Module, records: list[RolloutRecord], temperature: float = 1.0, replay: bool = False
) -> list[Tensor]:
    """Return the trainer's minus the engine's log-probabilities of every response."""
    tokens, attention = padded(records)
    if replay:
        trace, recorded = align([r.routing for r in records], attention)
        with replay_routing(model, trace, recorded):
            scores = trainer_scores(model, tokens, attention, temperature)
    else:
        scores = trainer_scores(model, tokens, attention, temperature)
    found = []
    for row, record in zip(scores, records, strict=True):
        first = len(record.prompt_ids) - 1
        found.append(row[first : first + len(record.response_ids)] - torch.tensor(record.rollout_logprobs))
    return found


def error_of(model: nn.Module, records: list[RolloutRecord]) -> float:
    """Return the trainer's own float32 error on the tokens of records, prompts included."""
    tokens, attention = padded(records)
    return float32_error(model, tokens, attention, attention)


@torch.no_grad()
def differing(model: nn.Module, record: RolloutRecord) -> tuple[int, int]:
    """Return how many tokens the engine routed, and how many of them otherwise than transformers does."""
    with record_routing(model) as recording:
        model(input_ids=torch.tensor([[*record.prompt_ids, *record.response_ids]]), use_cache=False)
    trace = record.routing
    found = agreement(trace, recording.trace.slice(trace.start, trace.start + trace.rows))
    return int(found["tokens"]), int(found["token_mismatches"])


class Rollouts:
    """Samples from an engine, and compares with transformers what comes back."""

    def __init__(self, engine: Transport, model: nn.Module) -> None:
        self.engine, self.model = engine, model
        self.shape = moe_layout(model).shape
        self.reading = read_server(engine.server_info())
        self.version = 0
        self.found: dict[str, Any] = {}

    def records(
        self,
        rows: list[list[int]],
        count: int,
        *,
        sampling: SamplingSettings = PLAIN,
        n: int = 1,
        **options: Any,
    ) -> tuple[list[RolloutRecord], list[dict[str, Any]]]:
        """Sample, and return records and the engine's own responses."""
        request = generate_request(
            rows, sampling, max_new_tokens=count, routing=True, n=n, **options,
        )  # fmt: skip
        outputs = self.engine.generate(request)
        provenance = to_provenance(self.reading, sampling=sampling, weight_version=self.version)
        stamp = str(self.version) if self.version else None
        parts = {"provenance": provenance, "shape": self.shape, "n": n}
        return to_records(outputs, prompt_ids=rows, weight_version=stamp, **parts), outputs

    def check(self, name: str, rows: list[list[int]], count: int, **options: Any) -> list[RolloutRecord]:
        """Sample, and note how far records are from transformers."""
        records, outputs = self.records(rows, count, **options)
        sampling = options.get("sampling", PLAIN)
        routed = [differing(self.model, record) for record in records]
        self.found[name] = {
            "responses": len(records),
            "sampled": sum(len(r.response_ids) for r in records),
            "logp": float(torch.cat(gaps(self.model, records, sampling.temperature)).abs().mean()),
            "float32_error": error_of(self.model, records),
            "routed": sum(tokens for tokens, _ in routed),
            "differing": sum(count for _, count in routed),
            "rows": [r.routing.rows for r in records] if len(records) < 4 else None,
            "reasons": sorted({str(r.finish_reason) for r in records}),
            "cached": sum(out["meta_info"]["cached_tokens"] for out in outputs),
            "stamps": sorted({out["meta_info"]["weight_version"] for out in outputs}),
        }
        return records


def ways(rollouts: Rollouts) -> None:
    """Sample in every way that changes how routes and log-probabilities are put together."""
    [whole] = prompts(1, 200, seed=0, shortest=200)
    check = rollouts.check
    check("chunked", [whole], 8, ignore_eos=True)
    check("same prompt again", [whole], 8, ignore_eos=True)
    check("concurrent", prompts(8, 90, seed=2), 60, ignore_eos=True)
    check("groups", prompts(3, 40, seed=3), 12, n=3)
    check("stop tokens", prompts(12, 40, seed=4), 40, stop_token_ids=[5, 6])
    check("temperature", prompts(4, 40, seed=5), 20, sampling=SamplingSettings(temperature=0.6, top_p=0.9))
    [begun] = prompts(1, 20, seed=8, shortest=20)
    [first], _ = rollouts.records([begun], 8, ignore_eos=True)
    conversation = [*begun, *first.response_ids.tolist()]
    [second] = check("second turn", [conversation + prompts(1, 7, seed=9, shortest=7)[0]], 8, ignore_eos=True)
    kept = second.routing.slice(0, first.routing.rows)
    rollouts.found["second turn"]["as sampled"] = bool(torch.equal(kept.experts, first.routing.experts))


def message_of(function: Any, *args: Any, **kwargs: Any) -> str:
    """Return the error that a call ends with."""
    try:
        function(*args, **kwargs)
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@torch.no_grad()
def train(model: nn.Module, seed: int) -> None:
    """Move every weight, as far as a few large optimizer steps do."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.03 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)


def verified_by(
    engine: Transport, parameters: Callable[[], NamedTensors], model: nn.Module, probes: Tensor, dtype: str
) -> Verified:
    """Return an engine whose updates are verified by what a model scores."""
    rollout = Rollout(engine, PLAIN, max_new_tokens=1)
    return Verified(rollout, parameters, lambda ids: scoring.score_tokens(model, ids), probes, dtype)


def updates(rollouts: Rollouts) -> dict[str, Any]:
    """Return the verdicts on the updates that every engine is held to, and leave the engine with the weights it had."""
    model = copy.deepcopy(rollouts.model)
    verified = verified_by(rollouts.engine, lambda: checkpoint_parameters(model), model, PROBES, "float32")
    found = updated(verified, model)
    update_weights(
        rollouts.engine, checkpoint_parameters(rollouts.model), dtype="float32", weight_version=rollouts.version
    )
    return found


def weights(rollouts: Rollouts, dtype: str) -> dict[str, Any]:
    """Update an engine's weights in right and wrong ways, and see what is noticed."""
    engine, model = rollouts.engine, rollouts.model
    probes = torch.randint(2, 16, (8, 24), generator=torch.Generator().manual_seed(9))
    verified = verified_by(engine, lambda: checkpoint_parameters(model), model, probes, dtype)
    before = copy.deepcopy(model)
    train(model, 1)
    statuses = [verified.update().status]
    rollouts.version = verified.rollout.weight_version
    records = rollouts.check("after an update", prompts(8, 90, seed=2), 60, ignore_eos=True)
    moved = max(float(gap.abs().max()) for gap in gaps(before, records))
    train(model, 3)
    # What a loop over named_parameters() sends: SGLang reports success and drops the experts.
    update_weights(engine, model.named_parameters(), dtype=dtype, weight_version="3", fused_experts=True)
    statuses.append(verified.verify().status)
    fused = message_of(update_weights, engine, model.named_parameters(), dtype=dtype)
    broken = ("model.norm.weight", torch.full((model.config.hidden_size,), torch.nan))
    half = half_done(rollouts, broken, dtype)
    # In small buckets, after all of these.
    update_weights(engine, checkpoint_parameters(model), dtype=dtype, weight_version="4", bucket_bytes=30_000)
    statuses.append(verified.verify().status)
    rollouts.version = 4
    rollouts.check("after small buckets", prompts(4, 60, seed=8), 20)
    return {"statuses": statuses, "moved": moved, "fused": fused, **half}


def half_done(rollouts: Rollouts, broken: tuple[str, Tensor], dtype: str) -> dict[str, Any]:
    """Let an update fail after a part of it was sent, and see what the engine says of itself and what is refused."""
    engine = rollouts.engine
    parts = [*checkpoint_parameters(rollouts.model), broken]
    failed = message_of(update_weights, engine, parts, dtype=dtype, weight_version="9", bucket_bytes=30_000)
    request = generate_request([3, 4, 5], PLAIN, max_new_tokens=2)
    refused = message_of(engine.generate, request)
    # As another client would, who does not know of the failure.
    stamp = engine._generate(request)["meta_info"]["weight_version"]
    return {"failed": failed, "refused": refused, "stamp": stamp}


def paused(rollouts: Rollouts) -> dict[str, Any]:
    """Update weights while another client generates: its request is aborted, and a later one is served afterwards."""
    import requests

    engine = rollouts.engine
    assert isinstance(engine, HttpTransport)
    body = generate_request([3, 4, 5], PLAIN, max_new_tokens=450, ignore_eos=True) | {"stream": True}
    with requests.post(f"{engine.http.url}/generate", json=body, stream=True, timeout=60) as answer:
        lines = (line for line in answer.iter_lines(chunk_size=1 << 20) if line.startswith(b"data: {"))
        next(lines)  # its first tokens are there, so that it runs
        update_weights(engine, checkpoint_parameters(rollouts.model), dtype="float32", weight_version="paused")
        last = json.loads([*lines][-1][6:])["meta_info"]
    [after] = engine.generate(generate_request([[3, 4, 5]], PLAIN, max_new_tokens=4))
    return {
        "reason": last["finish_reason"]["type"],
        "sampled": last["completion_tokens"],
        "stamp": after["meta_info"]["weight_version"],
    }


def refusals(rollouts: Rollouts) -> dict[str, Any]:
    """Let the engine refuse, and return the errors."""
    engine = rollouts.engine
    [long] = prompts(1, 600, seed=11, shortest=600)
    found = {"long": message_of(engine.generate, generate_request([long], PLAIN, max_new_tokens=2))}
    unknown = [[3, 4], [5, rollouts.model.config.vocab_size]]
    found["unknown token"] = message_of(engine.generate, generate_request(unknown, PLAIN, max_new_tokens=2))
    if isinstance(engine, HttpTransport):
        found["paused"] = paused(rollouts)
    engine.flush_cache()
    return found


def exact(model: str, way: str) -> dict[str, Any]:
    """Do everything in float32, where transformers must be met on every token."""
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with running(model, "float32", way) as engine:
        config = MismatchConfig.parse({"routing": {"mode": "R3"}})
        assert config is not None
        verdict = check_server(engine.server_info(), config=config, trainer_dtype="float32")
        verdict.raise_for_problems()
        rollouts = Rollouts(engine, trainer)
        ways(rollouts)
        rows = prompts(6, 50, seed=10, shortest=50)
        scored, ids = score_tokens(engine, rows), torch.tensor(rows)
        found = {
            "version": engine.version,
            "notes": verdict.notes,
            "scored": float((scored - scoring.score_tokens(trainer, ids)).abs().mean()),
            "scored_float32_error": float32_error(trainer, ids, torch.ones_like(ids), torch.ones_like(ids)),
            "refusals": refusals(rollouts),
            "updates": updates(rollouts),
            "weights": weights(rollouts, "float32"),
        }
    return {**found, "rollouts": rollouts.found}


def half(model: str, dtype: str) -> dict[str, Any]:
    """Sample in half precision; score with transformers in the same precision, with its own routes and with the engine's."""
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    with running(model, dtype, "engine") as engine:
        rollouts = Rollouts(engine, trainer)
        vocabulary = trainer.config.vocab_size
        records, _ = rollouts.records(prompts(48, 40, 20, vocabulary, 5), 24, ignore_eos=True)
        native, replayed = gaps(trainer, records), gaps(trainer, records, replay=True)
        found = {
            "version": engine.version,
            "dtype": rollouts.reading.model_dtype,
            "routed": sum(len(gap) for gap in native),
            "differing": [differing(trainer, record)[1] for record in records],
            "native": [float(gap.abs().max()) for gap in native],
            "replayed": [float(gap.abs().max()) for gap in replayed],
            "mean": float(torch.cat(replayed).abs().mean()),
        }
    return found
