"""45 faults, and clean set-ups, that the doctor was not written for: what is planted, what may be said of it, and a judge.

    python -m tests.peers.doctor.unseen            # all of them, with what the doctor says and the seconds of each
    python -m tests.peers.doctor.unseen 08b 16a    # some

They were planted on 25 November 2026 for the first time. What is right to say follows from what is planted, and was written down
before this doctor was asked.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.examining import examine, examine_logged
from mismatch_ext.adapters.transformers.doctor import models
from mismatch_ext.adapters.transformers.doctor.scorer import Scorer
from mismatch_ext.adapters.vllm.doctor import VllmEngine
from mismatch_ext.adapters.vllm.engine import runner
from torch.nn.functional import cross_entropy, gelu
from transformers import AutoModelForCausalLM

from examples.arithmetic.pretrain import IGNORED, draw_demonstrations, pack
from examples.arithmetic.recipe import RECIPES
from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import UNFAMILIAR_DIGITS, make_dataset
from examples.arithmetic.tokenizer import EOS_ID, encode
from examples.doctor import lora
from mismatch_ext.doctor import Sample, read_rollouts
from mismatch_ext.doctor.diagnose import STANDS_OUT
from mismatch_ext.doctor.tokens import SURE
from mismatch_ext.errors import MismatchError, RecordError
from tests.peers.conftest import LAUNCHED
from tests.peers.doctor.faults import Edit, Engines, LentRun, Planted, Tensors, edited, plant, said
from tests.peers.scenarios import Scenario, run_fresh
from tests.rendezvous import rendezvous

PROMPTS = Path(__file__).parents[3] / "examples/doctor/prompts.jsonl"
RIGHT_NAME, RIGHT_PLACE = "right name", "right place, unexplained"
PARTLY, HONEST, SMALL = "partly, honest", "unexplained, honest", "below rounding"
WRONG, OVER, FALSE, MISSED = "wrong name", "over-claimed", "false clean", "missed"
CLEAR, ACCUSED = "clean", "accused"
RIGHT, BAD = {RIGHT_NAME, RIGHT_PLACE, SMALL}, {WRONG, OVER, FALSE, ACCUSED}
# Places beside blocks: the request or its prompt; which tokens were drawn; the run's own pass against a plain one.
REQUEST, TOKENS, OWN_PASS = "request", "tokens", "own pass"
ATTENTION = tuple((layer, "attention") for layer in range(4))
MLP = tuple((layer, "mlp") for layer in range(4))
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
        refused: What the refusal of such a log says.
        own: Edits the configuration that the trainer reads.
        both: The trainer holds the edited checkpoint, too.
        adapter: The trainer holds an adapter, and the engine the base with so many times its change; 1 is no fault.
        told: Whether the doctor is told of the older checkpoint.
        engine: Changes the live model of every engine that starts.
        loader: Changes the tensors that an engine loads.
        trainer: Changes the trainer's model, with which the oracle computes, too.
        passing: Changes the model while the trainer's own pass computes.
        asked: Changes each prompt on both sides.
        log: Returns response ids and log-probabilities as they are logged.
        trl: Changes what a run of TRL scores with: gets the model and the attention mask, and returns the mask.
        long: Whether prompts and responses are long.
    """

    what: str
    names: tuple[tuple[str, ...], ...] = ()
    part: tuple[str, ...] = ()
    within: dict[str, tuple[float, float]] = field(default_factory=dict)
    place: tuple[Any, ...] = ()
    clean: str = FALSE
    refused: str = ""
    own: Edit | None = None
    both: bool = False
    adapter: float | None = None
    told: bool = True
    engine: Callable[[Any], None] = nothing
    loader: Callable[[Tensors], None] = nothing
    trainer: Callable[[Any], None] = nothing
    passing: Callable[[Any], AbstractContextManager[None]] = nullcontext
    asked: Callable[[list[int]], list[int]] | None = None
    log: Callable[[Sample, Any], tuple[Rows, Rows]] | None = None
    trl: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    long: bool = False


def _run(dtype: str = "bfloat16", divided: float = 1.0, arguments: Any = None, **sampling: Any) -> dict[str, Any]:
    both = {"dtype": dtype, "trainer_dtype": dtype, "temperature": divided, "arguments": arguments or {}}
    return {**both, "sampling": {"temperature": 1.0, "seed": 0} | sampling}


def _rope(layers: Sequence[int], factor: float, model: Any) -> None:
    for number in layers:
        attention = model.model.layers[number].self_attn
        table = copy.deepcopy(attention.rotary_emb)
        table.base *= factor
        table.cos_sin_cache = table._compute_cos_sin_cache().to(table.cos_sin_cache.dtype)
        attention.rotary_emb = table


def _fp8_cache_in_odd_layers(model: Any) -> None:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    for layer in model.model.layers[1::2]:
        layer.self_attn.attn.register_forward_pre_hook(lambda _, a: (a[0], rounded(a[1]), rounded(a[2]), *a[3:]))


def _final_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-5


def _normed(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what an RMSNorm makes that never leaves x's dtype."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return normed * module.weight.to(x.dtype)


def _rounding_norms(model: Any) -> None:
    def forward(module: Any, x: torch.Tensor, residual: Any = None) -> Any:
        x = x if residual is None else x + residual
        return _normed(module, x) if residual is None else (_normed(module, x), x)

    for module in model.modules():
        if type(module).__name__ == "RMSNorm":
            module.forward = partial(forward, module)


@contextmanager
def _rounding_norms_now(model: Any) -> Iterator[None]:
    norms = [module for module in model.modules() if type(module).__name__ == "Qwen3RMSNorm"]
    for module in norms:
        module.forward = lambda x, module=module: _normed(module, x.to(torch.bfloat16))
    yield
    for module in norms:
        del module.forward


def _half_layer(model: Any) -> None:
    layer = model.model.layers[2]
    own = layer.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = own(hidden.to(torch.bfloat16), *args, **kwargs)
        return (out[0].to(hidden.dtype), *out[1:]) if isinstance(out, tuple) else out.to(hidden.dtype)

    layer.forward = forward


@contextmanager
def _half_layer_now(model: Any) -> Iterator[None]:
    _half_layer(model)
    yield
    del model.model.layers[2].forward


def _half_layer_of_run(model: Any, mask: torch.Tensor) -> torch.Tensor:
    if "forward" not in vars(model.model.layers[2]):
        _half_layer(model)
    return mask


def _attends_to_padding(every: int, model: Any, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    mask[::every] = 1
    return mask


def _drops(model: Any, mask: torch.Tensor) -> torch.Tensor:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.05
        layer.self_attn.train()
    return mask


def _gelu(model: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return gelu(gate, approximate="tanh") * up

    model.model.layers[1].mlp.act_fn.forward = forward


def _named(weights: Tensors, end: str) -> torch.Tensor:
    return weights[next(name for name in weights if name.endswith(end))]


def _expert(rows: slice, weights: Tensors) -> None:
    _named(weights, "layers.1.mlp.experts.5.down_proj.weight")[rows] *= 0.7


def _exchanged(weights: Tensors) -> None:
    """Exchange a query head of 32 rows with a key head."""
    query, key = (_named(weights, f"layers.2.self_attn.{name}_proj.weight") for name in "qk")
    query[:32], key[:32] = key[:32].clone(), query[:32].clone()


def _smaller_equals(weights: Tensors) -> None:
    _named(weights, "embed_tokens.weight")[encode("=")[0]] *= 0.9


def _no_query_norm(weights: Tensors) -> None:
    _named(weights, "layers.3.self_attn.q_norm.weight").fill_(1.0)


def _fp8_mlps(weights: Tensors) -> None:
    for name, weight in weights.items():
        if ".mlp." in name and name.endswith("_proj.weight"):
            scale = weight.abs().amax(-1, keepdim=True) / 448
            weights[name] = (weight / scale).to(torch.float8_e4m3fn).float() * scale


def _aged(weights: Tensors) -> None:
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


def _window(size: int) -> Edit:
    kinds = {"max_window_layers": 0, "layer_types": ["sliding_attention"] * 4}
    return lambda config: config.update(use_sliding_window=True, sliding_window=size, **kinds)


def _epsilon(config: dict[str, Any]) -> None:
    config["rms_norm_eps"] = 1e-5


# A token that stands for two, "+0": an engine that samples them apart, and a trainer whose tokenizer merges them.
PAIR, MERGED = tuple(encode("+0")), 16


def _one_token_more(config: dict[str, Any]) -> None:
    config["vocab_size"] = MERGED + 1


def _merged_row(weights: Tensors) -> None:
    for name, factor in (("model.embed_tokens.weight", 1.0), ("lm_head.weight", 0.6)):
        row = weights[name][list(PAIR)].mean(0, keepdim=True) * factor
        weights[name] = torch.cat([weights[name], row])


def _retokenized(how: str, sample: Sample, engine: Any) -> tuple[Rows, Rows]:
    responses, logprobs = [], []
    for ids, values in zip(sample.responses, sample.logprobs, strict=True):
        merged, summed, at = [], [], 0
        while at < len(ids):
            step = 2 if ids[at : at + 2] == PAIR else 1
            merged.append(MERGED if step == 2 else ids[at])
            summed.append(sum(values[at : at + step]))
            at += step
        responses.append(tuple(merged))
        logprobs.append({"fewer": values, "cut": values[: len(merged)]}.get(how, tuple(summed)))
    if how == "again":
        masks = tuple((True,) * len(row) for row in responses)
        logprobs = engine.score(
            replace(sample, responses=tuple(responses), logprobs=tuple(logprobs), masks=masks)
        ).logprobs
    return responses, logprobs


def _as_sampled(sample: Sample, engine: Any) -> tuple[Rows, Rows]:
    return sample.responses, sample.logprobs


HALF, SINGLE, COOLED = _run("float16"), _run("float32"), {"divided": 0.7, "temperature": 0.7}
RAW, SYSTEM, BOS = {"logprobs_mode": "raw_logprobs"}, [4, 5, 12, 6, 7, 13], [EOS_ID]
AGED: dict[str, Any] = {"older": (_aged,)}
ROPE: dict[str, Any] = {"engine": partial(_rope, (0, 1), 1.05), "part": ("rope_theta",), "place": ATTENTION[:2]}
STALE: dict[str, Any] = {**AGED, "kept": ".layers.2.", "within": {"temperature": (0.97, 0.99), "stale_layer": (2, 2)},
                         "place": (ATTENTION[2], MLP[2])}  # fmt: skip
UNTOLD: dict[str, Any] = {**STALE, "told": False, "names": (("temperature",), ())}
NORMS: dict[str, Any] = {**AGED, "kept": "norm", "place": ATTENTION, "part": ("stale_weights",)}
HALVED: dict[str, Any] = {"what": "layer 2 of the trainer in bfloat16, both float32", "run": SINGLE}
MERGES: dict[str, Any] = {"config": _one_token_more, "weights": _merged_row, "both": True}
TAIL: dict[str, Any] = {
    "within": {"temperature": (0.93, 0.97), "top_p": (0.88, 0.92), "top_k": (6, 6)},
    "place": (REQUEST,),
}
FAULTS = {
    "01a": Unseen(what="rope_theta x 1.05 in layers 0 and 1", **ROPE),
    "01b": Unseen(what="the same, float32", run=SINGLE, **ROPE),
    "01c": Unseen(what="the same, float16", run=HALF, **ROPE),
    "02a": Unseen(what="half the rows of one expert x 0.7", kind="moe", weights=partial(_expert, slice(0, 64)), place=MLP[1:2],
                  clean=SMALL),
    "02c": Unseen(what="the same by the loader, float32", kind="moe", loader=partial(_expert, slice(0, 64)), place=MLP[1:2],
                  run=SINGLE),
    "02e": Unseen(what="all rows of that expert, float16", kind="moe", weights=partial(_expert, slice(None)), place=MLP[1:2],
                  run=HALF),
    "03a": Unseen(what="temperature 0.98, and layer 2 of an older checkpoint", names=(("temperature",), ("stale_layer",)),
                  run=_run(temperature=0.98), **STALE),
    "03b": Unseen(what="the same, of an unknown checkpoint", run=_run(temperature=0.98), **UNTOLD),
    "03c": Unseen(what="the same, of an unknown checkpoint, float16", run=_run("float16", temperature=0.98), **UNTOLD),
    "04a": Unseen(trainer=_half_layer, place=(ATTENTION[2], MLP[2]), **HALVED),
    "04b": Unseen(passing=_half_layer_now, names=(("trainer_dtype",),), **HALVED),
    "04c": Unseen(trl=_half_layer_of_run, names=(("trainer_dtype",),), place=(OWN_PASS,), **HALVED),
    "05a": Unseen(what="log: two tokens as one, too many log-probabilities", log=partial(_retokenized, "fewer"),
                  refused="must be equal", **MERGES),
    "05b": Unseen(what="log: two tokens as one, log-probabilities cut", log=partial(_retokenized, "cut"), part=("shifted",),
                  **MERGES),
    "05c": Unseen(what="log: two tokens as one, log-probabilities added", log=partial(_retokenized, "summed"), **MERGES),
    "05d": Unseen(what="log: two tokens as one, scored again", log=partial(_retokenized, "again"), place=(TOKENS,), **MERGES),
    "06a": Unseen(what="window: trainer 64, engine 48", own=_window(64), config=_window(48), long=True,
                  names=(("sliding_window",),), within={"sliding_window": (48, 48)}, place=ATTENTION),
    "06b": Unseen(what="window: trainer 48, engine 64", own=_window(48), config=_window(64), long=True,
                  names=(("sliding_window",),), within={"sliding_window": (64, 64)}, place=ATTENTION),
    "06c": Unseen(what="window: trainer 64, engine none", own=_window(64), long=True, names=(("sliding_window",),),
                  place=ATTENTION),
    "07a": Unseen(what="fp8 keys and values in layers 1 and 3", engine=_fp8_cache_in_odd_layers,
                  part=("kv_fp8", "kv_fp8_truncated"), place=ATTENTION[1::2]),
    "08a": Unseen(what="temperature 0.95 and top_p 0.9", names=(("temperature",), ("top_p",)),
                  run=_run(temperature=0.95, top_p=0.9), **TAIL),
    "08b": Unseen(what="temperature 0.9 and top_p 0.95", names=(("temperature",), ("top_p",)), place=(REQUEST,),
                  run=_run(temperature=0.9, top_p=0.95), within={"temperature": (0.88, 0.92), "top_p": (0.93, 0.97)}),
    "08c": Unseen(what="temperature 0.95 and top_k 6", names=(("temperature",), ("top_k",)),
                  run=_run(temperature=0.95, top_k=6), **TAIL),
    "09a": Unseen(what="adapter merged twice", adapter=2.0, place=ATTENTION + MLP),
    "09b": Unseen(what="adapter not applied", adapter=0.0, names=(("adapter_not_applied",),), place=ATTENTION + MLP),
    "10a": Unseen(what="run: every second row's mask lost", trl=partial(_attends_to_padding, 2), place=(OWN_PASS,)),
    "10b": Unseen(what="run: dropout of attention in its own pass", trl=_drops, names=(("dropout",),), place=(OWN_PASS,)),
    "10c": Unseen(what="run: every row's mask lost", trl=partial(_attends_to_padding, 1), place=(OWN_PASS,)),
    "11a": Unseen(what="raw log-probabilities, temperature 0.7 on both sides", names=(("raw_logprobs",),), place=(REQUEST,),
                  run=_run(arguments=RAW, **COOLED)),
    "11b": Unseen(what="the same with top_p 0.9", names=(("raw_logprobs",), ("top_p",)),
                  run=_run(arguments=RAW, top_p=0.9, **COOLED), **TAIL),
    "12c": Unseen(what="epsilon of all norms x 10, float32", config=_epsilon, run=SINGLE, names=(("norm_eps",),),
                  part=("qk_norm_eps",), within={"norm_eps": (9.5, 10.5)}, place=ATTENTION),
    "12d": Unseen(what="the engine's norms in bfloat16 throughout", engine=_rounding_norms, place=ATTENTION),
    "12e": Unseen(what="the trainer's norms in bfloat16 throughout", passing=_rounding_norms_now, names=(("trainer_dtype",),),
                  clean=MISSED),
    "14a": Unseen(what="two tokens in front of the prompt", seen=lambda ids: [*BOS, *BOS, *ids], part=("extra_token",),
                  place=(REQUEST,)),
    "14b": Unseen(what="a system prompt of 6 tokens, in the engine alone", seen=lambda ids: [*SYSTEM, *ids], place=(REQUEST,)),
    "14c": Unseen(what="log: the system prompt twice", asked=lambda ids: [*SYSTEM, *ids], seen=lambda ids: [*SYSTEM, *ids],
                  log=_as_sampled),
    "14d": Unseen(what="log: the first token twice", asked=lambda ids: [*BOS, *ids], seen=lambda ids: [*BOS, *ids],
                  log=_as_sampled, names=(("extra_token",),)),
    "15a": Unseen(what="a query and a key head exchanged by the loader", loader=_exchanged, place=ATTENTION[2:3]),
    "15b": Unseen(what="a query and a key head exchanged in the checkpoint", weights=_exchanged, place=ATTENTION[2:3]),
    "16a": Unseen(what="fp8 in the MLPs alone", weights=_fp8_mlps, names=(("weights_fp8",),), place=MLP, clean=MISSED),
    "16b": Unseen(what="norms of an older checkpoint", clean=SMALL, **NORMS),
    "16d": Unseen(what="norms of an older checkpoint, float32", run=SINGLE, **NORMS),
    "17a": Unseen(what="the embedding of one token x 0.9", loader=_smaller_equals, clean=SMALL),
    "17b": Unseen(what="GELU in layer 1", engine=_gelu, place=MLP[1:2]),
    "17d": Unseen(what="layer 3 without its norm of queries", loader=_no_query_norm, place=ATTENTION[3:]),
}  # fmt: skip
CLEAN = {
    "12a": Unseen(what="clean: the last norm's epsilon x 10, which moves nothing", engine=_final_epsilon),
    "12b": Unseen(what="clean: the same, float32", engine=_final_epsilon, run=SINGLE),
    "13a": Unseen(what="clean"),
    "13b": Unseen(what="clean: experts, R3", kind="moe", run=_run() | {"replays": True}),
    "13c": Unseen(what="clean: float16", run=HALF),
    "13d": Unseen(what="clean: a window of 64 on both sides", config=_window(64), both=True, long=True),
    "13e": Unseen(what="clean: an adapter on both sides", adapter=1.0),
    "13f": Unseen(what="clean: a log", log=_as_sampled),
    "13h": Unseen(what="clean: experts", kind="moe"),
    "13i": Unseen(what="clean: another seed", run=_run(seed=1)),
    "13k": Unseen(what="clean: experts, another seed", kind="moe", run=_run(seed=1)),
    "13m": Unseen(what="clean: temperature 0.7 on both sides", run=_run(**COOLED)),
}


@contextmanager
def hooked(fault: Unseen) -> Iterator[None]:
    """Plant what is in no checkpoint and in no request."""
    from vllm.model_executor.models import qwen3, qwen3_moe

    start, load, own = VllmEngine.__init__, models.load_model, Scorer.as_trainer

    def started(engine: VllmEngine, *args: Any, **kwargs: Any) -> None:
        start(engine, *args, **kwargs)
        fault.engine(runner(engine._llm).model)

    def loaded(path: Any, option: str = "--model", config: Any = None) -> Any:
        model = load(path, option, config)
        fault.trainer(model)
        return model

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
        stack.enter_context(patch.object(models, "load_model", loaded))
        stack.enter_context(patch.object(Scorer, "as_trainer", passing))
        for kind in (qwen3.Qwen3ForCausalLM, qwen3_moe.Qwen3MoeForCausalLM):
            stack.enter_context(loading(kind))
        yield


def planted(fault: Unseen, folder: Path, engines: Engines) -> LentRun:
    """Return the run with a fault, as `plant` does, with another trainer's checkpoint, or with an adapter."""
    run: Any = plant(replace(fault, run=fault.run or _run()), folder, engines)[0]
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
    if fault.adapter is not None:
        lora.trained(folder)
        adapter = folder / f"checkpoint-{lora.STEPS}"
        merged = dict(models.load_model(adapter).named_parameters())

        def times(weights: Tensors) -> None:
            for name in weights:
                weights[name] += fault.adapter * (merged[name].detach() - weights[name])

        served = None if fault.adapter == 1 else edited(FOLDER / fault.kind, folder / "served", None, times)
        run = replace(run, model=str(adapter), engine_model=served)
    return run


def found(number: str, fault: Unseen, folder: Path, engines: Engines) -> Any:
    """Plant a fault, and return the doctor's diagnosis; the message if the log is refused."""
    folder.mkdir()
    if fault.trl:
        scenario, payload = (
            Scenario("tests.peers.doctor.unseen", "kept_by_a_run"),
            {"number": number, "out": str(folder)},
        )
        # An engine in this process says that it is a rank.
        variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        ran = run_fresh(scenario, payload, {**variables, **rendezvous()}, 600)
        return json.loads(json.dumps(ran.expect()), object_hook=lambda fields: SimpleNamespace(**fields))
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
    except RecordError as error:
        return str(error)
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


def kept_by_a_run(number: str, out: str) -> dict[str, Any]:
    """Train with TRL, plant a fault in how the trainer scores, and return what the doctor says of the rows that the run kept."""
    from trl import GRPOTrainer

    import examples.trl_grpo as script

    fault, score = FAULTS[number], GRPOTrainer._get_per_token_logps_and_entropies
    assert fault.trl is not None

    @wraps(score)
    def scored(trainer: Any, model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        return score(trainer, model, input_ids, fault.trl(model, attention_mask), *args, **kwargs)  # type: ignore[misc]

    dtype = fault.run.get("dtype", "bfloat16")
    alarm = {"tokens": {"above": 0.0, "patience": 1}}
    block = {"monitor": {"alarms": alarm}, "precision": {"dtype": dtype}}
    given = {"output_dir": out, "eval_prompts": 0, "bf16": dtype == "bfloat16", "mismatch": json.dumps(block)}
    given |= {
        "max_steps": 2,
        "max_completion_length": 96,
        "per_device_train_batch_size": 160,
        "vllm_max_model_length": 160,
    }
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    with patch.object(GRPOTrainer, "_get_per_token_logps_and_entropies", scored):
        with patch.object(sys, "argv", ["trl_grpo.py", *arguments]):
            # A check of the run may stop it once the rows are kept.
            with suppress(MismatchError):
                script.main()
    kept = read_rollouts(next(Path(out).glob("**/evidence-1.jsonl.gz")))
    sides = LentRun(model=str(FOLDER / "dense"), dtype=dtype, trainer_dtype=dtype)
    return examine_logged(sides, kept, quick=True).data()


def places(found: Any) -> Iterator[Any]:
    """Yield the places that a diagnosis points to."""
    out = [block for block in found.blocks if block.ratio >= STANDS_OUT]
    if out:
        most = max(out, key=lambda block: block.ratio)
        yield most.layer, most.kind
    if any("weights, configuration and cache are sound" in note for note in found.notes):
        yield REQUEST
    # What it was tried to be, and is not, is part of that sentence.
    if any(cause.key == "layout" and cause.said.startswith("the run's own pass (") for cause in found.causes):
        yield OWN_PASS
    if found.verdict == "unexplained" and found.unexplained == 0 and abs(found.tokens_test.z) >= SURE:
        yield TOKENS


def judged(fault: Unseen, found: Any) -> str:
    """Return how right a diagnosis is, by what is planted and nothing else."""
    if isinstance(found, str):
        return RIGHT_NAME if fault.refused and fault.refused in found else WRONG
    if fault in CLEAN.values():
        return CLEAR if found.verdict == "clean" and not found.causes else ACCUSED
    pointed = set(places(found))
    causes = [cause for cause in found.causes if not (cause.key == "layout" and OWN_PASS in pointed)]
    allowed = {name for names in fault.names for name in names} | set(fault.part)
    for cause in causes:
        low, high = fault.within.get(cause.key, (-torch.inf, torch.inf))
        if cause.key not in allowed or not low <= cause.parameter <= high:
            return WRONG
    # That the tokens are not the trainer's own says nothing wrong of any fault that is planted here.
    if pointed - set(fault.place) - {TOKENS}:
        return WRONG
    keys = {cause.key for cause in causes}
    whole = bool(fault.names) and all(keys & set(names) for names in fault.names)
    if found.verdict == "clean":
        return fault.clean
    if whole or found.verdict == "explained":
        return RIGHT_NAME if whole else OVER
    if pointed & set(fault.place):
        return RIGHT_PLACE
    return PARTLY if causes else HONEST


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    number: str
    what: str
    said: str
    verdict: str
    judged: str
    seconds: float

    def __str__(self) -> str:
        said = self.said.replace("|", "/")
        return f"| {self.number} | {self.what} | {said} | {self.verdict} | {self.judged} | {self.seconds:.0f} |"


def table(faults: Mapping[str, Unseen], folder: Path) -> Iterator[Row]:
    """Yield what the doctor says of each fault, and how right that is."""
    engines = Engines()
    try:
        for number, fault in faults.items():
            began = time.perf_counter()
            diagnosis = found(number, fault, folder / number, engines)
            judgement = judged(fault, diagnosis)
            words, verdict = [diagnosis], "refused"
            if not isinstance(diagnosis, str):
                words, verdict = [*said(diagnosis), *(str(place) for place in places(diagnosis))], diagnosis.verdict
            yield Row(
                number=number, what=fault.what, said="; ".join(words), verdict=verdict, judged=judgement,
                seconds=time.perf_counter() - began,
            )  # fmt: skip
    finally:
        engines.end()


def main(faults: Mapping[str, Unseen]) -> None:
    """Print the table of all, or of the numbers that are given."""
    asked = sys.argv[1:] or [*faults]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for row in table({number: faults[number] for number in asked}, Path(folder)):
            print(row, flush=True)
            counts[row.judged] += 1
    print(", ".join(f"{judgement}: {count}" for judgement, count in counts.most_common()))


if __name__ == "__main__":
    main(FAULTS | CLEAN)
