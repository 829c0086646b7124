"""15 faults by someone who has not read the doctor: what is planted, and what may be said of it, in the form of `unseen`.

    python -m tests.peers.doctor.fresh          # all of them and a clean run, with what the doctor says and the seconds of each
    python -m tests.peers.doctor.fresh 27 31    # some

They were planted on 27 November 2026 for the first time. What may be said was committed before the doctor was asked, and so was
that a "Clean" is false for each of them: all move log-probabilities by more than rounding does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mismatch_ext.adapters.doctor.asking import ToSample
from torch.nn.functional import linear, logsigmoid

from mismatch_ext.doctor import Sample
from tests.peers.doctor.faults import Tensors, exchanged
from tests.peers.doctor.unseen import AGED, ATTENTION, CLEAN, MLP, REQUEST, TOKENS, Rows, Unseen, main


def _rotary(change: Callable[[Any], None], model: Any) -> None:
    """Change a copy of each layer's table: vLLM lends one to all models of a process."""
    for layer in model.model.layers:
        table = copy.deepcopy(layer.self_attn.rotary_emb)
        change(table)
        layer.self_attn.rotary_emb = table


def _interleaved(table: Any) -> None:
    table.is_neox_style = False


def _at(moved: Callable[[torch.Tensor], torch.Tensor], table: Any) -> None:
    """Rotate as if tokens stood elsewhere."""
    own = table.forward
    table.forward = lambda positions, *args, **kwargs: own(moved(positions), *args, **kwargs)


def _short(positions: torch.Tensor) -> torch.Tensor:
    return positions.clamp(max=63)


def _ahead(positions: torch.Tensor) -> torch.Tensor:
    """Move what is decoded, alone in its pass, by one."""
    from vllm.forward_context import get_forward_context

    metadata: Any = get_forward_context().attn_metadata
    if not metadata:
        return positions
    starts = next(iter(metadata.values())).query_start_loc
    moved = positions.clone()
    moved[starts[:-1][starts.diff() == 1].long()] += 1
    return moved


def _tiled_heads(model: Any) -> None:
    """Give four heads of queries the keys and values 0, 1, 0, 1 in the place of 0, 0, 1, 1."""

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :].flatten(-2)

    for layer in model.model.layers:
        attention = layer.self_attn.attn
        attention.register_forward_pre_hook(lambda _, args: (exchanged(args[0]), *args[1:]))
        attention.register_forward_hook(lambda _, args, out: exchanged(out))


def _skips_last_layer(model: Any) -> None:
    model.model.layers[-1].forward = lambda positions, hidden_states, residual: (hidden_states, residual)


def _scaled_embedding(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: out * 2)


def _capped_logits(model: Any) -> None:
    model.logits_processor.soft_cap = CAP


def _sigmoid_gate(model: Any) -> None:
    """Weigh the chosen experts by sigmoids: a softmax of their logarithms, which vLLM normalizes, is that."""
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, out: (logsigmoid(out[0].float()).to(out[0].dtype), out[1]))


def _with_biases(weights: Tensors) -> None:
    made = torch.Generator().manual_seed(0)
    for name in [name for name in sorted(weights) if "self_attn" in name and name.endswith("_proj.weight")]:
        bias = 0.1 * torch.randn(len(weights[name]), generator=made)
        # vLLM's Qwen3 has none there.
        weights[name.replace("weight", "bias")] = bias * ("o_proj" not in name)


def _without_biases(weights: Tensors) -> None:
    for name in [name for name in weights if name.endswith("_proj.bias")]:
        weights[name].zero_()
        if "o_proj" in name:
            del weights[name]


def _fp8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().max().float().clamp(min=1e-12) / 448
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


@contextmanager
def _fp8_training(model: Any) -> Iterator[None]:
    """Multiply in fp8, a scale for each tensor, as FP8 training does in all linear layers but the head."""
    layers = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    for layer in layers:
        layer.forward = lambda x, layer=layer: linear(_fp8(x), _fp8(layer.weight))
    yield
    for layer in layers:
        del layer.forward


def _cooled_quarter(sample: Sample, engine: Any) -> tuple[Rows, Rows]:
    """Sample every fourth prompt at a temperature of its own."""
    sampling = {"temperature": 0.8, "seed": 0}
    asked = ToSample(prompts=sample.prompts, responses=len(sample.prompts), max_tokens=96, sampling=sampling, seen=None)
    cooled = engine.sample(asked)
    assert [tuple(ids) for ids in cooled.prompts] == [tuple(ids) for ids in sample.prompts]
    rows = [cooled if number % 4 == 0 else sample for number in range(len(sample.prompts))]
    return [row.responses[n] for n, row in enumerate(rows)], [row.logprobs[n] for n, row in enumerate(rows)]


def _two_digits(sample: Sample, engine: Any) -> tuple[Rows, Rows]:
    return sample.responses, [tuple(round(value, 2) for value in row) for row in sample.logprobs]


def _neighbours(sample: Sample, engine: Any) -> tuple[Rows, Rows]:
    """Log two of each 16 responses at each other's prompt."""
    responses, logprobs = list(sample.responses), list(sample.logprobs)
    for rows in (responses, logprobs):
        for number in range(0, len(rows) - 1, 16):
            rows[number], rows[number + 1] = rows[number + 1], rows[number]
    return responses, logprobs


CAP = 12.0
# The doctor's key is not on the user's page: these are the ones that say what the page does. Its own, `softcap`, was not among
# them when the doctor was first asked, so that this judge called 31 a wrong name; the value was asked for then as now.
CAPS = tuple(
    f"{what}{cap}"
    for what in ("", "logit_", "logits_", "final_", "final_logit_")
    for cap in ("softcap", "soft_cap", "cap")
)
BIASED: dict[str, Any] = {
    "config": lambda config: config.update(attention_bias=True),
    "weights": _with_biases,
    "both": True,
}
FRESH = {
    # Not on the list: the blocks of attention are wrong, and no number of the rotary family makes it right.
    "21": Unseen(what="rotary pairs interleaved, not halves", engine=partial(_rotary, _interleaved), place=ATTENTION),
    # Not on the list: attention again. A scale or cap of attention would be wrong.
    "22": Unseen(what="keys and values repeated 0 1 0 1, not 0 0 1 1", engine=_tiled_heads, place=ATTENTION),
    # Not on the list: layer 3. An error that says so is as good, and is reported by hand.
    "23": Unseen(what="the last layer skipped", engine=_skips_last_layer, place=(ATTENTION[3], MLP[3])),
    # Not on the list: attention, in any layer.
    "24": Unseen(what="biases of queries, keys and values dropped by the loader", loader=_without_biases, place=ATTENTION,
                 **BIASED),
    # No block is wrong. The older checkpoint is right for a part; "Explained" by all of it would be too much.
    "25": Unseen(what="the head of an older checkpoint", kept="lm_head", part=("stale_weights",), **AGED),
    # On the list, by the engine's comparison with itself: its prefill is right.
    "26": Unseen(what="decoded tokens one position late", engine=partial(_rotary, partial(_at, _ahead)),
                 names=(("decode_path",),), place=ATTENTION),
    # Not on the list: attention, best with the token where it begins. Scaled positions, a window or a cut prompt are wrong.
    "27": Unseen(what="positions end at 63", engine=partial(_rotary, partial(_at, _short)), long=True, place=ATTENTION),
    # Not on the list: the blocks of experts, or the router whose function it is. Their norm, scale and number are right.
    "28": Unseen(what="experts weighed by sigmoids, then normalized", kind="moe", engine=_sigmoid_gate, part=("router",),
                 place=MLP),
    # Not on the list: layer 2's experts.
    "29": Unseen(what="experts 3 and 7 of layer 2 exchanged", kind="moe", place=MLP[2:3],
                 loader=exchanged("layers.2.mlp.experts.3.", "layers.2.mlp.experts.7.")),
    # Not on the list, and no block is wrong on its own input: unexplained, without a place.
    "30": Unseen(what="embedding x 2", engine=_scaled_embedding),
    # On the list, with its value.
    "31": Unseen(what="logits capped at 12", engine=_capped_logits, names=(CAPS,),
                 within=dict.fromkeys(CAPS, (0.9 * CAP, 1.1 * CAP))),
    # On the list: the trainer's arithmetic is the coarser one, and all its blocks differ. The engine's weights are not fp8.
    "32": Unseen(what="the trainer's own pass in fp8", passing=_fp8_training, names=(("trainer_dtype",),), place=ATTENTION + MLP),
    # No one temperature is right but that of the quarter; that tokens were drawn otherwise, or that it is the request, is.
    "33": Unseen(what="log: every fourth response at temperature 0.8", log=_cooled_quarter, part=("temperature",),
                 within={"temperature": (0.78, 0.82)}, place=(TOKENS, REQUEST)),
    # Not on the list: unexplained. The error is 2.5e-3 on average, more than rounding's 1e-3.
    "34": Unseen(what="log: log-probabilities of two digits", log=_two_digits),
    # Not on the list: unexplained; that the tokens are not the trainer's own would be the right place.
    "35": Unseen(what="log: one response in eight at its neighbour's prompt", log=_neighbours, place=(TOKENS, REQUEST)),
}  # fmt: skip
CHECKED = FRESH | {"13a": CLEAN["13a"]}

if __name__ == "__main__":
    main(CHECKED)
