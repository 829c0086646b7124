"""Faults, and clean set-ups, that the doctor was not written for: what is planted, what may be said of it, and a judge.

What is right to say follows from what is planted, and was written down before this doctor was asked.
"""

from __future__ import annotations

import copy
import json
import os
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.examining import examine, examine_logged
from mismatch_ext.adapters.transformers.doctor.scorer import Scorer
from mismatch_ext.adapters.vllm.doctor import VllmEngine
from mismatch_ext.adapters.vllm.engine import runner
from torch.nn.functional import cross_entropy, gelu
from transformers import AutoModelForCausalLM

from examples.arithmetic.pretrain import IGNORED, draw_demonstrations, pack
from examples.arithmetic.recipe import RECIPES
from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import UNFAMILIAR_DIGITS, make_dataset
from examples.arithmetic.tokenizer import encode
from mismatch_ext.doctor import Sample, read_rollouts
from mismatch_ext.doctor.diagnose import STANDS_OUT
from mismatch_ext.doctor.tokens import SURE
from tests.peers.doctor.faults import (
    Edit,
    Engines,
    LentRun,
    Planted,
    Tensors,
    edited,
    merged,
    plant,
    prompts_changed,
    said,
)

PROMPTS = Path(__file__).parents[3] / "examples/doctor/prompts.jsonl"
RIGHT_NAME, RIGHT_PLACE = "right name", "right place, unexplained"
PARTLY, HONEST = "partly, honest", "unexplained, honest"
WRONG, OVER, FALSE = "wrong name", "over-claimed", "false clean"
CLEAR, ACCUSED = "clean", "accused"
RIGHT, BAD = {RIGHT_NAME, RIGHT_PLACE}, {WRONG, OVER, FALSE, ACCUSED}
# Places beside blocks: the request or its prompt; which tokens were drawn.
REQUEST, TOKENS = "request", "tokens"
Rows = Sequence[Sequence[Any]]


def nothing(_: Any) -> None:
    """Change nothing."""


@dataclass(frozen=True, kw_only=True)
class Unseen(Planted):
    """A fault, and what may be said of it.

    Args:
        what: What is planted.
        names: For each of the faults its right names; an empty one has no name on the list.
        part: Names that are right for a part of what is planted.
        within: Allowed parameters, by name.
        place: Blocks, or other places, that differ.
        clean: What it is to call this clean.
        own: Edits the configuration that the trainer reads.
        both: The trainer holds the edited checkpoint, too.
        told: Whether the doctor is told of the older checkpoint.
        engine: Changes the live model of every engine that starts.
        loader: Changes the tensors that an engine loads.
        passing: Changes the model while the trainer's own pass computes.
        asked: Changes each prompt on both sides.
        log: Returns response ids and log-probabilities as they are logged.
        long: Whether prompts and responses are long.
    """

    what: str
    names: Sequence[Sequence[str]] = ()
    part: Sequence[str] = ()
    within: Mapping[str, Sequence[float]] = field(default_factory=dict)
    place: Sequence[str] = ()
    clean: str = FALSE
    own: Edit | None = None
    both: bool = False
    told: bool = True
    engine: Callable[[Any], None] = nothing
    loader: Callable[[Tensors], None] = nothing
    passing: Callable[[Any], AbstractContextManager[None]] = nullcontext
    asked: Callable[[list[int]], list[int]] | None = None
    log: Callable[[Sample, Any], tuple[Rows, Rows]] | None = None
    long: bool = False


def rope_in_two_layers(model: Any) -> None:
    for number in (0, 1):
        attention = model.model.layers[number].self_attn
        table = copy.deepcopy(attention.rotary_emb)
        table.base *= 1.05
        table.cos_sin_cache = table._compute_cos_sin_cache().to(table.cos_sin_cache.dtype)
        attention.rotary_emb = table


def fp8_cache_in_odd_layers(model: Any) -> None:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    for layer in model.model.layers[1::2]:
        layer.self_attn.attn.register_forward_pre_hook(lambda _, a: (a[0], rounded(a[1]), rounded(a[2]), *a[3:]))


def widen_final_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-5


@contextmanager
def halve_a_layer(model: Any) -> Iterator[None]:
    """Compute layer 2 in bfloat16."""
    layer = model.model.layers[2]
    own = layer.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = own(hidden.to(torch.bfloat16), *args, **kwargs)
        return (out[0].to(hidden.dtype), *out[1:]) if isinstance(out, tuple) else out.to(hidden.dtype)

    layer.forward = forward
    yield
    del layer.forward


def cap_logits(model: Any) -> None:
    model.logits_processor.soft_cap = 12.0


def gelu_in_a_layer(model: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return gelu(gate, approximate="tanh") * up

    model.model.layers[1].mlp.act_fn.forward = forward


def _named(weights: Tensors, end: str) -> torch.Tensor:
    return weights[next(name for name in weights if name.endswith(end))]


def scale_half_an_expert(weights: Tensors) -> None:
    _named(weights, "layers.1.mlp.experts.5.down_proj.weight")[:64] *= 0.7


def exchange_heads(weights: Tensors) -> None:
    """Exchange a query head of 32 rows with a key head."""
    query, key = (_named(weights, f"layers.2.self_attn.{name}_proj.weight") for name in "qk")
    query[:32], key[:32] = key[:32].clone(), query[:32].clone()


def drop_query_norm(weights: Tensors) -> None:
    _named(weights, "layers.3.self_attn.q_norm.weight").fill_(1.0)


def round_mlps_to_fp8(weights: Tensors) -> None:
    for name, weight in weights.items():
        if ".mlp." in name and name.endswith("_proj.weight"):
            scale = weight.abs().amax(-1, keepdim=True) / 448
            weights[name] = (weight / scale).to(torch.float8_e4m3fn).float() * scale


def age(weights: Tensors) -> None:
    """Put in the weights of six steps of Adam away."""
    torch.manual_seed(5)
    drawn, model = random.Random(5), AutoModelForCausalLM.from_pretrained(FOLDER / "dense", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(6):
        batch = pack(draw_demonstrations(drawn, RECIPES["dense"], 32), 128)
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights |= {name: p.detach().clone() for name, p in model.named_parameters() if name in weights}


# A token that stands for two, "+0": an engine that samples them apart, and a trainer whose tokenizer merges them.
PAIR, MERGED = tuple(encode("+0")), 16


def add_merged_row(weights: Tensors) -> None:
    for name, factor in (("model.embed_tokens.weight", 1.0), ("lm_head.weight", 0.6)):
        row = weights[name][list(PAIR)].mean(0, keepdim=True) * factor
        weights[name] = torch.cat([weights[name], row])


def retokenized(sample: Sample, engine: Any) -> tuple[Rows, Rows]:
    """Log two tokens as one, with the sum of their log-probabilities."""
    responses, logprobs = [], []
    for ids, values in zip(sample.responses, sample.logprobs, strict=True):
        merged, summed, at = [], [], 0
        while at < len(ids):
            step = 2 if ids[at : at + 2] == PAIR else 1
            merged.append(MERGED if step == 2 else ids[at])
            summed.append(sum(values[at : at + step]))
            at += step
        responses.append(tuple(merged))
        logprobs.append(tuple(summed))
    return responses, logprobs


def as_sampled(sample: Sample, engine: Any) -> tuple[Rows, Rows]:
    return sample.responses, sample.logprobs


EFFECTS: dict[str, Any] = {
    effect.__name__: effect
    for effect in (
        rope_in_two_layers,
        fp8_cache_in_odd_layers,
        widen_final_epsilon,
        halve_a_layer,
        cap_logits,
        gelu_in_a_layer,
        scale_half_an_expert,
        exchange_heads,
        drop_query_norm,
        round_mlps_to_fp8,
        age,
        add_merged_row,
        retokenized,
        as_sampled,
    )
}


def _read(row: dict[str, Any]) -> Unseen:
    """Return a fault from its row in unseen.toml."""
    fields = dict(row)
    dtype = fields.pop("dtype", "bfloat16")
    run = {
        "dtype": dtype,
        "trainer_dtype": dtype,
        "temperature": fields.pop("temperature", 1.0),
        "arguments": fields.pop("arguments", {}),
        "sampling": {"temperature": 1.0, "seed": 0} | fields.pop("sampling", {}),
        "replays": fields.pop("replays", False),
    }
    for name in ("engine", "loader", "passing", "log", "weights"):
        if name in fields:
            fields[name] = EFFECTS[fields[name]]
    fields["older"] = tuple(EFFECTS[name] for name in fields.get("older", ()))
    for name, read in (("config", merged), ("own", merged), ("seen", prompts_changed), ("asked", prompts_changed)):
        if name in fields:
            fields[name] = read(fields[name])
    return Unseen(run=run, **fields)


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FAULTS, CLEAN = ({number: _read(row) for number, row in _ROWS[group].items()} for group in ("FAULTS", "CLEAN"))


@contextmanager
def hooked(fault: Unseen) -> Iterator[None]:
    """Plant what is in no checkpoint and in no request."""
    from vllm.model_executor.models import qwen3, qwen3_moe

    start, own = VllmEngine.__init__, Scorer.as_trainer

    def started(engine: VllmEngine, *args: Any, **kwargs: Any) -> None:
        start(engine, *args, **kwargs)
        fault.engine(runner(engine._llm).model)

    @contextmanager
    def passing(scorer: Scorer) -> Iterator[None]:
        with own(scorer), fault.passing(scorer.model):
            yield

    def loading(kind: Any) -> Any:
        inner = kind.load_weights

        def loads(model: Any, weights: Any) -> Any:
            tensors = {name: tensor.clone() for name, tensor in weights}
            fault.loader(tensors)
            return inner(model, tensors.items())

        return patch.object(kind, "load_weights", loads)

    with ExitStack() as stack:
        stack.enter_context(patch.object(VllmEngine, "__init__", started))
        stack.enter_context(patch.object(Scorer, "as_trainer", passing))
        for kind in (qwen3.Qwen3ForCausalLM, qwen3_moe.Qwen3MoeForCausalLM):
            stack.enter_context(loading(kind))
        yield


def planted(fault: Unseen, folder: Path, engines: Engines) -> LentRun:
    """Return the run with a fault, as `plant` does, and with another configuration of the trainer."""
    run: Any = plant(fault, folder, engines)[0]
    if fault.both:
        run = replace(run, model=run.engine_model, engine_model=None)
    if fault.own:
        run = replace(
            run,
            model=edited(FOLDER / fault.kind, folder / "own", fault.own, None),
            engine_model=run.engine_model or run.model,
        )
    if not fault.told:
        run = replace(run, older=())
    return run


def found(fault: Unseen, folder: Path, engines: Engines) -> Any:
    """Plant a fault, and return the doctor's diagnosis."""
    folder.mkdir()
    run = planted(fault, folder, engines)
    rows: Any = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    rows = make_dataset(192, UNFAMILIAR_DIGITS, seed=77) if fault.long else rows
    rows = make_dataset(160, seed=4242) if fault.log else rows
    prompts = [encode(row["prompt"]) for row in rows]
    prompts = prompts if fault.asked is None else [fault.asked(ids) for ids in prompts]
    seen = None if fault.seen is None else [fault.seen(ids) for ids in prompts]
    live = {fault.engine, fault.loader} != {nothing}
    if live:
        engines.end()
    try:
        with hooked(fault):
            if fault.log:
                return logged(fault, run, prompts, seen, folder / "rollouts.jsonl")
            sizes = {"responses": 96, "max_tokens": 128} if fault.long else {"responses": 192, "max_tokens": 96}
            return examine(run, prompts, seen=seen, **sizes)
    finally:
        if live:
            engines.end()


def logged(fault: Unseen, run: LentRun, prompts: Any, seen: Any, path: Path) -> Any:
    """Sample, log as a run would that writes no provenance, and have the doctor look at the file."""
    assert fault.log is not None
    engine = run.start(None)
    sample = engine.sample(ToSample(prompts=prompts, responses=160, max_tokens=96, sampling=run.sampling, seen=seen))
    responses, logprobs = fault.log(sample, engine)
    keys = ("prompt_ids", "response_ids", "rollout_logprobs")
    lines = [dict(zip(keys, row, strict=True)) for row in zip(sample.prompts, responses, logprobs, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return examine_logged(run, read_rollouts(path))


def places(found: Any) -> Iterator[str]:
    """Yield the places that a diagnosis points to."""
    out = [block for block in found.blocks if block.ratio >= STANDS_OUT]
    if out:
        most = max(out, key=lambda block: block.ratio)
        yield f"{most.kind} {most.layer}"
    if any("weights, configuration and cache are sound" in note for note in found.notes):
        yield REQUEST
    if found.verdict == "unexplained" and found.unexplained == 0 and abs(found.tokens_test.z) >= SURE:
        yield TOKENS


def judged(fault: Unseen, found: Any) -> str:
    """Return how right a diagnosis is, by what is planted and nothing else."""
    if fault in CLEAN.values():
        return CLEAR if found.verdict == "clean" and not found.causes else ACCUSED
    pointed = set(places(found))
    allowed = {name for names in fault.names for name in names} | set(fault.part)
    for cause in found.causes:
        low, high = fault.within.get(cause.key, (-torch.inf, torch.inf))
        if cause.key not in allowed or not low <= cause.parameter <= high:
            return WRONG
    # That the tokens are not the trainer's own says nothing wrong of any fault that is planted here.
    if pointed - set(fault.place) - {TOKENS}:
        return WRONG
    keys = {cause.key for cause in found.causes}
    whole = bool(fault.names) and all(keys & set(names) for names in fault.names)
    if found.verdict == "clean":
        return fault.clean
    if whole or found.verdict == "explained":
        return RIGHT_NAME if whole else OVER
    if pointed & set(fault.place):
        return RIGHT_PLACE
    return PARTLY if found.causes else HONEST


def table(faults: Mapping[str, Unseen], folder: Path) -> dict[str, tuple[str, str]]:
    """Return, for each fault, how right the doctor is and what it says."""
    rows, engines = {}, Engines()
    try:
        for number, fault in faults.items():
            diagnosis = found(fault, folder / number, engines)
            words = [*said(diagnosis), *places(diagnosis)]
            rows[number] = judged(fault, diagnosis), f"{fault.what}: {'; '.join(words)}"
    finally:
        engines.end()
    return rows
