"""What one GPU shows of the gap and of its remedies: one record and one page.

    python -m benchmarks.gpu --real                                        # SmolLM2-135M and a mixture made from it
    python -m benchmarks.gpu --model PATH --experts PATH --out runs/gpu    # any checkpoints on disk

Needs torch and transformers, and vLLM for `gate`. The engine of the other parts is transformers' own decode with a KV cache,
in the engine's dtype. The trainer scores the same tokens in one pass, and so does an oracle in float32 with the engine's
rounded weights. Without `--model`, `--experts` or `--real` the weights are random, and `gate` takes the shipped model.
`--device cpu --quick` runs the same code in a minute, and with `--real` on the first two of the model's layers.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mismatch_ext.adapters.doctor.prompts import read_prompts
from mismatch_ext.adapters.transformers.doctor.models import end_tokens, load_model, routing_shape
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.bench_kl_full import FORMS
from benchmarks.bench_precision import trained
from benchmarks.harness import measured_on, paired
from examples import smollm2
from examples.arithmetic.shipped import shipped_model
from mismatch_ext.centering import projected_terms
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.routing import RoutingTrace, agreement, agreement_metrics, align
from mismatch_ext.sums import merged
from mismatch_ext.versions import installed

DTYPES = {"float32 (control)": torch.float32, "bf16": torch.bfloat16, "FP16": torch.float16}
VOCABULARIES = {"Llama 3": 128_256, "Qwen3": 151_936, "Gemma 3": 262_144}
HEAD_INPUTS = 1024
MEASURES = ("logp_abs_diff_mean", "k3_kl", "f_1.1", "f_2", "logp_abs_diff_max")
PROMPTS = Path(__file__).with_name("gpu_prompts.txt")
ARITHMETIC = Path(__file__).parents[1] / "examples/doctor/prompts.jsonl"  # of the shipped model
Row = dict[str, Any]


class Scale(NamedTuple):
    """How much is measured: responses, their tokens, rows in a pass, repeats of a timing, and the random models' shape."""

    responses: int
    prompt: int
    new: int
    rows: int
    repeats: int
    hidden: int
    layers: int
    vocabulary: int
    experts: int
    top_k: int


QUICK = Scale(8, 6, 16, 4, 2, 64, 2, 512, 8, 2)
CPU = Scale(64, 32, 64, 16, 3, 256, 6, 8192, 16, 4)
GPU = Scale(256, 64, 256, 32, 7, 2048, 16, 151_936, 64, 8)  # about 1.4 billion parameters


class Rollout(NamedTuple):
    """Prompts and responses `[B, P + T]`, the engine's log-probabilities and which tokens count `[B, T]`, and its routes."""

    ids: Tensor
    logprobs: Tensor
    mask: Tensor
    routes: list[RoutingTrace]

    def split(self, rows: int) -> list[Rollout]:
        """Return parts of at most that many rows."""
        starts = range(0, len(self.ids), rows)
        return [Rollout(*(field[start : start + rows] for field in self)) for start in starts]


def random_model(experts: bool, scale: Scale, seed: int) -> nn.Module:
    """Return a random Qwen3 in float32 whose logits are about as spread as a trained model's."""
    heads = max(1, scale.hidden // 64)
    fields: dict[str, Any] = {
        "vocab_size": scale.vocabulary,
        "hidden_size": scale.hidden,
        "intermediate_size": 3 * scale.hidden,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 64,
        "tie_word_embeddings": False,
    } | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if experts:
            fields |= {"num_experts": scale.experts, "num_experts_per_tok": scale.top_k, "norm_topk_prob": True}
            config = Qwen3MoeConfig(**fields, moe_intermediate_size=max(16, scale.hidden // 8))
            model: nn.Module = Qwen3MoeForCausalLM(config)
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**fields))
        with torch.no_grad():
            model.lm_head.weight.normal_(std=3 / math.sqrt(scale.hidden))
    return model.eval()


def policy(given: argparse.Namespace, experts: bool, scale: Scale) -> tuple[nn.Module, Tensor, str]:
    """Return a model in float32, prompts `[B, P]` for it, and what it is."""
    path = given.experts if experts else given.model
    model = load_model(path) if path else random_model(experts, scale, given.seed)
    if (routing_shape(model) is not None) != experts:
        raise ValueError(f"{path} is a model {'without' if experts else 'with'} experts; give it by the other option")
    if path:
        rows = read_prompts(given.prompts, path)
        width = min(scale.prompt, *map(len, rows))
        prompts = torch.tensor([ids[:width] for ids in rows]).repeat(-(-scale.responses // len(rows)), 1)
    else:
        generator = torch.Generator().manual_seed(given.seed + 1)
        prompts = torch.randint(scale.vocabulary, (scale.responses, scale.prompt), generator=generator)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    what = f"{Path(path).name or 'random Qwen3'}, {'MoE' if experts else 'dense'}, {size:.3g} million parameters"
    return model.to(given.device), prompts[: scale.responses].to(given.device), what


def in_dtype(model: nn.Module, dtype: torch.dtype, held: torch.dtype | None = None) -> nn.Module:
    """Return a copy whose parameters are rounded to a dtype, and held in another one if it is named; buffers keep theirs."""
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype).to(held or dtype)
    return made


@torch.no_grad()
def decode(model: nn.Module, prompts: Tensor, new: int, generator: torch.Generator, *, routed: bool = False) -> Rollout:
    """Sample responses token by token with a KV cache; tokens after the end of a response do not count."""
    ids, seen, cache, logprobs, masks = prompts, prompts, None, [], []
    ends = torch.tensor(end_tokens(model), dtype=torch.int64, device=prompts.device)
    going = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    with record_routing(model) if routed else nullcontext() as recording:
        for _ in range(new):
            output = model(input_ids=seen, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logp = output.past_key_values, output.logits[:, -1].float().log_softmax(-1)
            seen = torch.multinomial(logp.exp(), 1, generator=generator)
            logprobs.append(logp.gather(1, seen)[:, 0])
            masks.append(going)
            going = going & ~torch.isin(seen[:, 0], ends)
            ids = torch.cat([ids, seen], 1)
            if len(ends) and not bool(going.any()):
                break
    routes = _traces(recording.passes, ids) if recording else []
    return Rollout(ids, torch.stack(logprobs, 1).cpu(), torch.stack(masks, 1).cpu(), routes)


def _traces(passes: list[RoutingTrace], ids: Tensor) -> list[RoutingTrace]:
    """Return a trace per row of `ids` `[B, P + T]`: a route for each token but the last, which the model never saw."""
    whole = torch.cat([part.experts.view(len(ids), -1, *part.experts.shape[1:]) for part in passes], 1).cpu()
    layers, experts = passes[0].layers, passes[0].num_experts
    return [
        RoutingTrace(parts=(routes,), layers=layers, num_experts=experts, versions=((0, 0),), tokens=tokens)
        for routes, tokens in zip(whole, ids[:, :-1].cpu().to(torch.int32), strict=True)
    ]


@torch.no_grad()
def score(model: nn.Module, rollout: Rollout, rows: int) -> Tensor:
    """Return log-probabilities of the responses `[B, T]`, by passes over at most `rows` rows without their last tokens."""
    scored = []
    for part in rollout.split(rows):
        new = part.logprobs.shape[1]
        logits = model(input_ids=part.ids[:, :-1], use_cache=False, logits_to_keep=new).logits
        for row, tokens in zip(logits, part.ids[:, -new:], strict=True):  # row by row: logits are large
            scored.append(row.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu())
    return torch.stack(scored)


def gap(trainer: Tensor, engine: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the measures of a gap that the page shows, and the number of tokens."""
    metrics = gap_metrics(gap_sums(old=trainer, rollout=engine, mask=mask))
    return {name: float(metrics[name]) for name in MEASURES} | {"tokens": int(mask.sum())}


def measure_gate(given: argparse.Namespace, scale: Scale) -> Iterator[Row]:
    """Yield what `mismatch-ext gate` measures, in a process of its own."""
    model, prompts = given.model or shipped_model("dense"), given.prompts if given.model else ARITHMETIC
    command = [sys.executable, "-m", "mismatch_ext", "gate", "--model", model, "--prompts", prompts]
    command += ["--json", given.out / "gate.json", *(["--quick"] if given.quick else [])]
    status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if status not in (0, 1):  # 1 is a gate that did not pass
        raise RuntimeError(f"{shlex.join(map(str, command))} ended with {status}")
    for figure in json.loads((given.out / "gate.json").read_text(encoding="utf-8"))["figures"]:
        row = {"model": Path(model).name, "figure": figure["name"], "measured": figure["value"]}
        yield row if figure["limit"] is None else row | {"at most": figure["limit"], "limit by": figure["by"]}


def measure_gap(given: argparse.Namespace, scale: Scale) -> Iterator[Row]:
    """Yield, by dtype, the gap of decode to the trainer, and of decode and prefill to the oracle."""
    model, prompts, what = policy(given, False, scale)
    for number, (name, dtype) in enumerate(DTYPES.items()):
        engine = in_dtype(model, dtype)
        rollout = decode(engine, prompts, scale.new, _generator(given, number))
        prefill = score(engine, rollout, scale.rows)
        oracle = score(in_dtype(model, dtype, torch.float32), rollout, scale.rows)
        with torch.autocast(torch.device(given.device).type, dtype=dtype, enabled=dtype != torch.float32):
            trainer = score(model, rollout, scale.rows)
        sides = {
            "engine's decode − trainer in autocast over float32 weights": (trainer, rollout.logprobs),
            "engine's decode − its own prefill": (prefill, rollout.logprobs),
            "engine's decode − float32 oracle": (oracle, rollout.logprobs),
            "engine's prefill − float32 oracle": (oracle, prefill),
        }
        for side, (a, b) in sides.items():
            yield {"model": what, "engine": name, "compared": side, **gap(a, b, rollout.mask)}


def measure_experts(given: argparse.Namespace, scale: Scale) -> Iterator[Row]:
    """Yield, by dtype, the gap under the trainer's own routes and under the engine's, and the share of tokens that differ."""
    model, prompts, what = policy(given, True, scale)
    for number, (name, dtype) in enumerate(DTYPES.items()):
        held = in_dtype(model, dtype)
        rollout = decode(held, prompts, scale.new, _generator(given, 10 + number), routed=True)
        row = {"model": what, "dtype": name}
        own, replayed, counts = [], [], []
        for part in rollout.split(scale.rows):
            trace, known = align(part.routes, torch.ones_like(part.ids[:, :-1]))
            with record_routing(held) as recording:
                own.append(score(held, part, scale.rows))
            counts.append(agreement(trace, recording.trace, known))
            with replay_routing(held, trace, known):  # raises where a router does not obey
                replayed.append(score(held, part, scale.rows))
        differ = agreement_metrics(merged(*counts), trace.layers)["routing/token_mismatch_frac"]
        measures = [gap(torch.cat(side), rollout.logprobs, rollout.mask) for side in (own, replayed)]
        yield {**row, "routes": "trainer's own", **measures[0], "tokens with other experts": differ}
        yield {**row, "routes": "engine's, replayed (R3)", **measures[1], "tokens with other experts": 0.0}


def measure_costs(given: argparse.Namespace, scale: Scale) -> Iterator[Row]:
    """Yield time and, on a GPU, peak memory of ours over theirs, after their results were found equal."""
    model = random_model(True, scale._replace(vocabulary=1024), given.seed).to(given.device).train()
    ids = torch.randint(1024, (4, 16 * scale.prompt), generator=torch.Generator().manual_seed(1)).to(given.device)
    with torch.no_grad(), record_routing(model) as recording:
        model(input_ids=ids, use_cache=False)

    def step(replayed: bool) -> Tensor:
        model.zero_grad(set_to_none=True)
        with replay_routing(model, recording.trace) if replayed else nullcontext():
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        return loss.detach()

    _equal("losses with and without replay", float(step(True)), float(step(False)))
    yield _cost(
        f"training step of a MoE, {ids.numel()} tokens: replay, no replay",
        lambda: step(True),
        lambda: step(False),
        given,
        scale,
    )
    device = torch.device(given.device).type
    ours = lambda: trained(LossScaler(device, init_scale=2.0**10, growth_interval=2000), device=device)  # noqa: E731
    theirs = lambda: trained(torch.amp.GradScaler(device, init_scale=2.0**10), device=device)  # noqa: E731
    _equal(
        "parameters after 20 steps", *(float(sum(p.double().abs().sum() for p in side())) for side in (ours, theirs))
    )
    yield _cost("20 FP16 steps: LossScaler, torch.amp.GradScaler", ours, theirs, given, scale)
    tokens = 8 if given.quick else 2048
    for name, vocabulary in VOCABULARIES.items():
        generator = _generator(given, 20)
        logits = torch.randn(tokens, vocabulary, generator=generator, device=given.device, requires_grad=True)
        reference = logits.detach() + 0.3 * torch.randn(tokens, vocabulary, generator=generator, device=given.device)

        def form(kind: str, logits: Tensor = logits, reference: Tensor = reference) -> float:
            logits.grad = None
            kl = FORMS[kind](logits, reference)
            kl.sum().backward()
            return float(kl.detach().double().sum())

        _equal(f"KL over {vocabulary}", form("ours"), form("naive"))
        what = f"exact KL of {tokens} tokens over {name}'s vocabulary of {vocabulary}: chunked, log_softmax of both"
        yield _cost(what, lambda form=form: form("ours"), lambda form=form: form("naive"), given, scale)
        del logits, reference
        yield _centering_cost(name, vocabulary, tokens, given, scale)


def _centering_cost(name: str, vocabulary: int, tokens: int, given: argparse.Namespace, scale: Scale) -> Row:
    """Return what score centering adds to the output head's part of a policy loss, forward and backward, as training calls it.

    The head is of 1,024 inputs, and the engine reports its 128 likeliest tokens.
    """
    generator = _generator(given, 21)
    hidden = torch.randn(tokens, HEAD_INPUTS, generator=generator, device=given.device, requires_grad=True)
    weight = torch.randn(vocabulary, HEAD_INPUTS, generator=generator, device=given.device) / HEAD_INPUTS**0.5
    with torch.no_grad():
        head_logprobs, head_ids = (hidden @ weight.T).log_softmax(-1).topk(128, dim=-1)

    def loss(centered: bool) -> Tensor:
        hidden.grad = None
        value = -(hidden @ weight.T).log_softmax(-1)[..., 0]
        if centered:
            terms, _ = projected_terms(hidden, weight, None, head_ids=head_ids, head_logprobs=head_logprobs)
            value = value + terms
        value.sum().backward()
        assert hidden.grad is not None
        return hidden.grad.norm()

    # The engine is the policy here, so that nothing is centered and both gradients are equal.
    _equal(f"gradients with and without centering over {vocabulary}", float(loss(True)), float(loss(False)))
    what = f"policy loss of {tokens} tokens over {name}'s vocabulary of {vocabulary}: with score centering, without"
    return _cost(what, lambda: loss(True), lambda: loss(False), given, scale)


def _equal(what: str, ours: float, theirs: float) -> None:
    if not abs(ours - theirs) <= 1e-4 * abs(theirs):
        raise RuntimeError(f"{what}: {ours} and {theirs} differ, so that their costs cannot be compared")


def _cost(
    what: str, ours: Callable[[], Any], theirs: Callable[[], Any], given: argparse.Namespace, scale: Scale
) -> Row:
    cuda = given.device.startswith("cuda")
    times = paired(
        what, ours, theirs, equal="", repeats=scale.repeats, wait=torch.cuda.synchronize if cuda else lambda: None
    )
    row = {
        "compared": what,
        "seconds of ours": times["ours"],
        "seconds of theirs": times["theirs"],
        "time ratio": 1 / times["ratio"],
    }
    if cuda:
        peaks = []
        for call in (ours, theirs):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        row |= {"GiB of ours": peaks[0] / 2**30, "GiB of theirs": peaks[1] / 2**30, "memory ratio": peaks[0] / peaks[1]}
    return row


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace, Scale], Iterator[Row]]]] = {
    # First, because vLLM takes a share of the whole memory.
    "gate": ("`mismatch-ext gate`, vLLM against transformers in bf16", measure_gate),
    "gap": ("Gap of decode and prefill, by dtype", measure_gap),
    "experts": ("Experts: the trainer's own routes, and the engine's replayed", measure_experts),
    "costs": ("Costs, ours over theirs", measure_costs),
}


def _generator(given: argparse.Namespace, offset: int) -> torch.Generator:
    return torch.Generator(given.device).manual_seed(1000 * given.seed + offset)


def record_of(given: argparse.Namespace, command: str, parts: dict[str, list[Row]]) -> dict[str, Any]:
    """Return the figures with command, device, versions, commit and date."""
    on = measured_on()
    device = torch.cuda.get_device_name() if given.device.startswith("cuda") else on["cpu"][0]
    versions = on["versions"] | {"cuda": torch.version.cuda, "triton": installed("triton")}
    return {"command": command, "device": device, **on, "versions": versions, "figures": parts}


def page_of(record: dict[str, Any]) -> str:
    """Return the record as markdown, a table per part."""
    lines = [
        f"# {record['device']}, {record['date']}",
        "",
        f"`{record['command']}`, commit {record['commit']}, {record['versions']}",
    ]
    for name, rows in record["figures"].items():
        heads = list(dict.fromkeys(key for row in rows for key in row))
        cells = [
            [f"{value:.3g}" if isinstance(value := row.get(key, ""), float) else str(value) for key in heads]
            for row in rows
        ]
        lines += [
            "",
            f"## {PARTS[name][0]}",
            "",
            *(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)),
        ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure the parts, and write the record and the page after each; 1 if a part failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="", help="folder of a dense checkpoint; default: random weights")
    parser.add_argument("--experts", default="", help="folder of a checkpoint with experts; default: random weights")
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M-Instruct and a mixture made from it")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="for these, as `mismatch-ext doctor` takes them")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    given = parser.parse_args(argv)
    if given.real:
        layers = 2 if given.quick else None
        given.model, given.experts = str(smollm2.unpack(layers)), str(smollm2.upcycle(layers=layers))
    cuda = given.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        raise SystemExit(f"--device {given.device}: torch {torch.__version__} sees no GPU; give --device cpu --quick.")
    torch.set_float32_matmul_precision("highest")  # a float32 side that multiplies in TensorFloat32 is no oracle
    torch.backends.cudnn.allow_tf32 = False
    given.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)])
    parts, failed = {}, False
    for name in tqdm(given.parts, file=sys.stderr):
        try:
            parts[name] = list(PARTS[name][1](given, QUICK if given.quick else GPU if cuda else CPU))
        except Exception as error:  # noqa: BLE001 - out of memory, or a missing kernel: the other parts stand without it
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
            failed = True
        record = record_of(given, command, parts)
        (given.out / "record.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (given.out / "page.md").write_text(page_of(record), encoding="utf-8")
    print(given.out / "record.json", given.out / "page.md", sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
