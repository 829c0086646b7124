"""What TRL's own loss computes: known values on made-up inputs, without a model and before an engine is built.

The block's terms are added to this loss and weighed as it weighs its own, so that it must be the loss that was run. Text cannot
tell: an edited comment changes nothing, and a function that the loss calls may change everything. Twenty computations of three
short rows take a hundredth of a second, and show each use of the ratio, the masks, the KL term and the denominators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import SeamError
from mismatch_ext.seams import named
from mismatch_ext.versions import PEERS, installed

IN_OBJECTIVE = ("kl", "correction", "sampling_mask", "routing")
"""Sections whose effect is inside TRL's own loss."""

ROWS, LENGTH = 3, 4
MODEL = object()


def _wave(step: float, scale: float = 1.0) -> Tensor:
    """Return numbers without a pattern, the same on every machine `[B, T]`."""
    return scale * torch.sin(step * torch.arange(1.0, ROWS * LENGTH + 1, dtype=torch.float64)).view(ROWS, LENGTH)


LOGPS = _wave(1.3, 0.4) - 2
INPUTS: dict[str, Tensor] = {
    "prompt_ids": torch.tensor([[0, 7], [8, 9], [10, 11]]),
    "prompt_mask": torch.tensor([[0, 1], [1, 1], [1, 1]]),
    "completion_ids": torch.arange(12, 24).view(ROWS, LENGTH),
    "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
    "advantages": torch.tensor([1.0, -0.7, 0.3], dtype=torch.float64),
}
OF_GRPO = {
    "old_per_token_logps": LOGPS - _wave(2.1, 0.3),
    "sampling_per_token_logps": LOGPS - _wave(0.7, 0.2),
    "ref_per_token_logps": LOGPS - _wave(1.9, 0.5),
    "importance_sampling_ratio": 1 + _wave(2.9, 0.3),
    "num_items_in_batch": torch.tensor(14.0, dtype=torch.float64),
}
OF_RLOO = {"old_logps": torch.tensor([-8.3, -3.6, -6.1], dtype=torch.float64)}
READ = {
    GRPOTrainer: {*INPUTS, *OF_GRPO, "tool_mask"} - {"num_items_in_batch"},  # not by every loss type
    RLOOTrainer: {*INPUTS, *OF_RLOO},
}
"""Keys of the micro-batch that each loss reads; beside them it may hand others to its scoring pass, under their own names."""

# A case is what differs from the defaults of `_trainer` and from these inputs; None leaves an input out.
CASES: list[dict[str, Any]] = [
    *(
        {"importance_sampling_level": level, "current_gradient_accumulation_steps": accumulation, "beta": beta}
        for level, accumulation, beta in product(("token", "sequence"), (1, 2), (0.0, 0.1))
    ),
    {"model.training": False, "current_gradient_accumulation_steps": 2},
    {"args.steps_per_generation": 4, "current_gradient_accumulation_steps": 2},
    {"accelerator.num_processes": 2},
    {"args.delta": 1.1},
    {"args.use_bias_correction_kl": True, "beta": 0.1},
    {"top_entropy_quantile": 0.5},
    {"off_policy_mask_threshold": 0.02},
    {"_entropy_bonus_enabled": True, "entropy_coef": 0.1},
    {"vllm_importance_sampling_correction": False},
    {"inputs.old_per_token_logps": None},
    {"inputs.advantages": _wave(0.9)},
    {"inputs.tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])},
]
# TRL 1.13.0 to 1.16.0, by loss type and in the order of the cases: loss plus slope times `_wave(0.31)`.
KNOWN: dict[str, tuple[float, ...]] = {
    "grpo": (
        -0.255348, -0.261563, -0.127674, -0.130782, -0.474976, -0.481191, -0.237488, -0.240595,
        -0.255348, -0.127674, -0.255348, -0.246410, -0.255335, -0.097173, -0.551869, -0.401897,
        -0.210749, -0.184481, 0.020267, -0.255933,
    ),
    "sapo": (
        -0.518537, -0.524752, -0.259268, -0.262376, -0.501078, -0.507293, -0.250539, -0.253646,
        -0.518537, -0.259268, -0.518537, -0.518537, -0.518524, -0.193414, -1.117822, -0.665085,
        -0.521449, -0.405153, 0.081609, -0.568823,
    ),
    "bnpo": (
        -0.501887, -0.504624, -0.250943, -0.252312, -0.735275, -0.738013, -0.367638, -0.369006,
        -0.501887, -0.250943, -0.501887, -0.490413, -0.497840, -0.200286, -0.699567, -0.648435,
        -0.470684, -0.514900, -0.159609, -0.422682,
    ),
    "dr_grpo": (
        -0.250943, -0.252312, -0.125472, -0.126156, -0.367638, -0.369006, -0.183819, -0.184503,
        -0.250943, -0.125472, -0.250943, -0.245207, -0.248920, -0.100143, -0.349784, -0.397492,
        -0.235342, -0.257450, -0.079805, -0.164376,
    ),
    "cispo": (
        0.063664, 0.061904, 0.031832, 0.030952, 0.063664, 0.061904, 0.031832, 0.030952,
        0.063664, 0.127328, 0.127328, 0.063664, 0.066265, 0.025475, 0.075825, -0.082885,
        0.064289, 0.063664, 0.031025, 0.044623,
    ),
    "dapo": (
        -0.322641, -0.324401, -0.161321, -0.162201, -0.472677, -0.474437, -0.236339, -0.237218,
        -0.322641, -0.645283, -0.645283, -0.315266, -0.320040, -0.128755, -0.449722, -0.469190,
        -0.302583, -0.331007, -0.102606, -0.211341,
    ),
    "vespo": (
        0.425194, 0.423435, 0.212597, 0.211717, 0.425194, 0.423435, 0.212597, 0.211717,
        0.425194, 0.850389, 0.850389, 0.425194, 0.427796, 0.192615, 0.468379, 0.278646,
        0.425194, 0.492080, 0.197246, 0.208551,
    ),
    "luspo": (
        -1.505660, -1.513872, -0.752830, -0.756936, -2.205826, -2.214039, -1.102913, -1.107019,
        -1.505660, -0.752830, -1.505660, -1.471240, -1.493519, -0.600858, -2.098702, -1.652209,
        -1.412052, -1.544700, -0.478827, -0.986258,
    ),
}  # fmt: skip
KNOWN_RLOO = 0.253514


class _Noted(dict[str, Any]):
    """A micro-batch that notes which of its keys are asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __iter__(self) -> Iterator[str]:  # so that a copy reads each key
        return super().__iter__()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def _part(case: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key.removeprefix(name): value for key, value in case.items() if key.startswith(name)}


def _trainer(kind: type[Any], case: Mapping[str, Any], score: Any) -> Any:
    """Return a trainer that has nothing but what its loss reads."""
    trainer = object.__new__(kind)
    vars(trainer).update(
        aux_loss_enabled=False, top_entropy_quantile=1.0, beta=0.0,
        importance_sampling_level="token", off_policy_mask_threshold=None, epsilon_low=0.1, epsilon_high=0.15,
        use_vllm=True, vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1, temperature=1.0,
        max_completion_length=6, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)), _get_per_token_logps_and_entropies=score,
    )  # fmt: skip
    # At their defaults, for a loss that reads more of them than the known one.
    defaults = {field.name: field.default for field in fields(GRPOConfig) if field.default is not MISSING}
    trainer.args = SimpleNamespace(**defaults)
    vars(trainer.args).update(
        use_bias_correction_kl=False, delta=None, steps_per_generation=1, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    names = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
    alone = dict.fromkeys(names, lambda tensor, *_, **__: tensor)
    trainer.accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, device=torch.device("cpu"), **alone)
    trainer.state = SimpleNamespace(global_step=0)
    trainer.model = SimpleNamespace(training=True)
    for part in ("args", "accelerator", "model"):
        vars(getattr(trainer, part)).update(_part(case, f"{part}."))
    vars(trainer).update({name: value for name, value in case.items() if "." not in name})
    return trainer


def compute(kind: type[Any], case: Mapping[str, Any]) -> tuple[float | str, set[str]]:
    """Return what TRL's own loss and its slope come to, or its error, and which keys of the micro-batch it reads."""
    logps, entropies, passed = LOGPS.clone().requires_grad_(), 1.5 + _wave(1.7), set[str]()
    rows = [torch.cat([INPUTS[f"prompt_{what}"], INPUTS[f"completion_{what}"]], dim=1) for what in ("ids", "mask")]

    def score(model: Any, tokens: Tensor, attention_mask: Tensor, length: int, *_: Any, **options: Any) -> Any:
        passed.update({"model", *options})
        if model is not MODEL or length != LENGTH or not all(map(torch.equal, (tokens, attention_mask), rows)):
            raise ValueError("it scores other tokens than those of its micro-batch")
        return logps, entropies, None

    given = {**INPUTS, **(OF_RLOO if kind is RLOOTrainer else OF_GRPO), **_part(case, "inputs.")}
    inputs = _Noted({name: value for name, value in given.items() if value is not None})
    try:
        with torch.enable_grad():
            loss = kind._compute_loss(_trainer(kind, case, score), MODEL, inputs)
            (slope,) = torch.autograd.grad(loss, logps)
        found: float | str = float(loss.detach() + (_wave(0.31) * slope).sum())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was seen
        found = f"{type(error).__name__}: {error}"
    return found, inputs.asked - passed if passed else set()


def changed(kind: type[Any], loss_type: str = "", *, values: bool = True) -> str | None:
    """Say what TRL's own loss does that it did not in the versions that were run; without `values`, only what it reads counts."""
    cases, known = ([{}], (KNOWN_RLOO,)) if kind is RLOOTrainer else (CASES, KNOWN[loss_type])
    found = [compute(kind, {"loss_type": loss_type, **case}) for case in cases]
    asked = set().union(*(keys for _, keys in found))
    if new := sorted(asked - READ[kind] - {"num_items_in_batch"}):
        return f"it reads {', '.join(map(repr, new))} of its inputs, which is new"
    for case, expected, (value, _) in zip(cases, known, found, strict=True):
        if isinstance(value, str) or (values and not abs(value - expected) < 1e-5):
            given = {name: of.tolist() if isinstance(of, Tensor) else of for name, of in case.items()}
            what = ", ".join(f"{name}={of}" for name, of in given.items())
            seen = f"raises {value}" if isinstance(value, str) else f"comes to {value:.6f} instead of {expected:.6f}"
            return f"with {what or 'made-up inputs'} it {seen}"
    if gone := sorted(READ[kind] - asked):
        return f"it no longer reads {', '.join(map(repr, gone))} of its inputs"
    return None


def check_loss(trainer: type[Any], block: MismatchConfig, loss_type: str) -> None:
    """Refuse sections inside TRL's own loss if that loss is not the one that was run, whatever its version and text."""
    features = [feature for feature in block.features if feature.partition(".")[0] in IN_OBJECTIVE]
    kind = RLOOTrainer if issubclass(trainer, RLOOTrainer) else GRPOTrainer
    if not features:
        return
    weighed = (
        block.kl is not None or block.correction is not None
    )  # the others change what is scored, not what is made of it
    if kind is RLOOTrainer or loss_type in KNOWN:
        change = changed(kind, loss_type, values=weighed)
    elif not weighed:
        return
    else:
        change = f"loss_type={loss_type!r} is none of {', '.join(KNOWN)}, whose values are known"
    if change is not None:
        version = installed("trl")
        sections = " and ".join(dict.fromkeys(feature.partition(".")[0] for feature in features))
        raise SeamError(
            f"{named(features)}: {kind.__name__}._compute_loss of trl {version} is not the loss that this release was run with"
            f"{f' (loss_type={loss_type!r})' if loss_type else ''}: {change}. Remove {sections} from the block, or install a "
            f"version that was run (pip install trl=={PEERS['trl'].nearest(version)})."
        )
