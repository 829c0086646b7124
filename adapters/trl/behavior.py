"""What TRL's own loss computes: known values on made-up inputs, without a model and before an engine is built.

The block's terms are added to this loss and weighed as it weighs its own, so that it must be the loss that was run. Text cannot
tell: an edited comment changes nothing, and a function that the loss calls may change everything. Two dozen computations of
three short rows take less than a tenth of a second. They show the ratio, the masks, the KL term and the denominators.

A later release may read more than the tested ones did. The loss is then computed without that: what it computes decides. An
input that batches may have is compared once more when one has it (`Objective.expect_known_inputs`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.trl.kl import BASELINE
from mismatch_ext.adapters.trl.scoring import MASKS, ROUTES
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import SeamError
from mismatch_ext.seams import named
from mismatch_ext.versions import PEERS, installed

IN_OBJECTIVE = ("kl", "correction", "sampling_mask", "routing")
"""Sections whose effect is inside TRL's own loss."""

DEFAULT_LOSS: str = GRPOConfig.loss_type

ROWS, LENGTH = 3, 4
MODEL = object()
AUX = torch.tensor(0.7, dtype=torch.float64)
PARTS = ("args", "accelerator", "state", "model")
"""Objects of a trainer that its loss reads from."""


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
HANDED = {
    "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss", "pixel_values",
    "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
}  # fmt: skip
"""Arguments of the scoring pass in the versions that were run."""
OURS = {ROUTES: "routing", MASKS: "sampling_mask", BASELINE: "kl"}
"""Keys of the micro-batch that are this package's, and their sections."""

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
    {"_entropy_bonus_enabled": True, "entropy_coef": 0.1, "current_gradient_accumulation_steps": 2},
    {"aux_loss_enabled": True, "router_aux_loss_coef": 0.1, "current_gradient_accumulation_steps": 2},
    {"vllm_importance_sampling_correction": False},
    {"inputs.old_per_token_logps": None},
    {"inputs.advantages": _wave(0.9)},
    {"inputs.tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])},
]
# TRL 1.13.0 to 1.16.0, by loss type and in the order of the cases: loss plus slope times `_wave(0.31)`. `python -m
# mismatch_ext.adapters.trl.behavior` prints them for the installed version.
KNOWN: dict[str, tuple[float, ...]] = {
    "grpo": (
        -0.255348, -0.261563, -0.127674, -0.130782, -0.474976, -0.481191, -0.237488, -0.240595,
        -0.255348, -0.127674, -0.255348, -0.246410, -0.255335, -0.097173, -0.551869, -0.401897,
        -0.200948, -0.092674, -0.210749, -0.184481, 0.020267, -0.255933,
    ),
    "sapo": (
        -0.518537, -0.524752, -0.259268, -0.262376, -0.501078, -0.507293, -0.250539, -0.253646,
        -0.518537, -0.259268, -0.518537, -0.518537, -0.518524, -0.193414, -1.117822, -0.665085,
        -0.332543, -0.224268, -0.521449, -0.405153, 0.081609, -0.568823,
    ),
    "bnpo": (
        -0.501887, -0.504624, -0.250943, -0.252312, -0.735275, -0.738013, -0.367638, -0.369006,
        -0.501887, -0.250943, -0.501887, -0.490413, -0.497840, -0.200286, -0.699567, -0.648435,
        -0.324218, -0.215943, -0.470684, -0.514900, -0.159609, -0.422682,
    ),
    "dr_grpo": (
        -0.250943, -0.252312, -0.125472, -0.126156, -0.367638, -0.369006, -0.183819, -0.184503,
        -0.250943, -0.125472, -0.250943, -0.245207, -0.248920, -0.100143, -0.349784, -0.397492,
        -0.198746, -0.090472, -0.235342, -0.257450, -0.079805, -0.164376,
    ),
    "cispo": (
        0.442303, 0.440543, 0.221152, 0.220272, 0.459174, 0.457414, 0.229587, 0.228707,
        0.442303, 0.884606, 0.884606, 0.442303, 0.444905, 0.210602, 0.510029, 0.295754,
        0.147877, 0.256152, 0.445541, 0.424425, 0.241179, 0.331721,
    ),
    "dapo": (
        -0.322641, -0.324401, -0.161321, -0.162201, -0.472677, -0.474437, -0.236339, -0.237218,
        -0.322641, -0.645283, -0.645283, -0.315266, -0.320040, -0.128755, -0.449722, -0.469190,
        -0.234595, -0.126321, -0.302583, -0.331007, -0.102606, -0.211341,
    ),
    "vespo": (
        0.425194, 0.423435, 0.212597, 0.211717, 0.425194, 0.423435, 0.212597, 0.211717,
        0.425194, 0.850389, 0.850389, 0.425194, 0.427796, 0.192615, 0.468379, 0.278646,
        0.139323, 0.247597, 0.425194, 0.492080, 0.197246, 0.208551,
    ),
    "luspo": (
        -1.505660, -1.513872, -0.752830, -0.756936, -2.205826, -2.214039, -1.102913, -1.107019,
        -1.505660, -0.752830, -1.505660, -1.471240, -1.493519, -0.600858, -2.098702, -1.652209,
        -0.826104, -0.717830, -1.412052, -1.544700, -0.478827, -0.986258,
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


class _Options:
    """The trainer's arguments: those of the cases, and the run's own for what a later release reads beside them."""

    def __init__(self, known: Mapping[str, Any], others: Mapping[str, Any], asked: dict[str, Any]) -> None:
        vars(self).update(known)
        self._others, self._asked = others, asked

    def __getattr__(self, name: str) -> Any:
        others: Mapping[str, Any] = vars(self).get("_others", {})
        if name not in others:
            raise AttributeError(f"the trainer's arguments have no {name!r}", name=name, obj=self)
        self._asked[f"self.args.{name}"] = others[name]
        return others[name]


class _Passing:
    """Stands for what the accelerator of a later release has: false, and a function that returns what it is given."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "a function that changes nothing"

    def __call__(self, value: Any = None, *_: Any, **__: Any) -> Any:
        return value


@dataclass
class Reads:
    """What a loss reads that the versions which were run do not read, and what it found there.

    Attributes:
        inputs: Keys of the micro-batch. A batch may lack each of them, and then the loss is the known one.
        handed: Keys of the micro-batch that it only hands to its scoring pass.
        attributes: Attributes by their name in the loss, such as "self.args.new_option", with the value that was given.
    """

    inputs: set[str] = field(default_factory=set)
    handed: set[str] = field(default_factory=set)
    attributes: dict[str, Any] = field(default_factory=dict)

    def sentence(self) -> str | None:
        """Say what is new and what follows from it; None if nothing is."""
        names = [f"inputs[{key!r}]" for key in sorted(self.inputs | self.handed)]
        names += [f"{name} ({value!r})" for name, value in sorted(self.attributes.items())]
        if not names:
            return None
        found = (
            f"The loss of trl {installed('trl')} reads {' and '.join(names)}, which no tested version does. With "
            "known inputs it still computes what they compute."
        )
        if self.inputs:
            keys = " or ".join(map(repr, sorted(self.inputs)))
            found += f" If a batch has {keys} and that changes the loss, sections inside of it are refused."
        return found


def _part(case: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key.removeprefix(name): value for key, value in case.items() if key.startswith(name)}


def _settings(config: Any) -> dict[str, Any]:
    """Return a run's own settings, or TRL's defaults without a run."""
    if config is not None:
        return {one.name: getattr(config, one.name) for one in fields(config)}
    return {one.name: one.default for one in fields(GRPOConfig) if one.default is not MISSING}


def _trainer(kind: type[Any], case: Mapping[str, Any], score: Any, settings: Mapping[str, Any], asked: Any) -> Any:
    """Return a trainer that has nothing but what its loss reads."""
    trainer = object.__new__(kind)
    # CISPO clips the ratio itself, the others its distance from 1.
    epsilon_high = 1.15 if case.get("loss_type") == "cispo" else 0.15
    vars(trainer).update(
        aux_loss_enabled=False, top_entropy_quantile=1.0, beta=0.0,
        importance_sampling_level="token", off_policy_mask_threshold=None, epsilon_low=0.1, epsilon_high=epsilon_high,
        use_vllm=True, vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1, temperature=1.0,
        max_completion_length=6, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)), _get_per_token_logps_and_entropies=score,
    )  # fmt: skip
    known = dict(
        use_bias_correction_kl=False, delta=None, steps_per_generation=1, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    trainer.args = _Options(known, settings, asked)
    names = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
    alone = dict.fromkeys(names, lambda tensor, *_, **__: tensor)
    trainer.accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, device=torch.device("cpu"), **alone)
    trainer.state = SimpleNamespace(global_step=0)
    trainer.model = SimpleNamespace(training=True)
    for part in ("args", "accelerator", "model"):
        vars(getattr(trainer, part)).update(_part(case, f"{part}."))
    vars(trainer).update({name: value for name, value in case.items() if "." not in name})
    return trainer


def _answer(trainer: Any, error: AttributeError, settings: Mapping[str, Any], answers: dict[str, Any]) -> bool:
    """Note what a loss gets for an attribute that the stand-in lacks; tell whether there is anything to give."""
    parts = {"self": trainer, **{f"self.{name}": getattr(trainer, name) for name in PARTS}}
    owner = next((name for name, part in parts.items() if part is error.obj), None)
    if owner is None or f"{owner}.{error.name}" in answers:
        return False
    value = None
    if owner == "self.accelerator":
        value = _Passing()
    elif owner == "self":
        value = settings.get(error.name or "")  # TRL's trainers take settings over under their own names
    answers[f"{owner}.{error.name}"] = value
    return True


def _give(trainer: Any, answers: Mapping[str, Any]) -> None:
    """Set the attributes that a loss was found to read."""
    for path, value in answers.items():
        owner, _, name = path.rpartition(".")
        part = trainer if owner == "self" else getattr(trainer, owner.removeprefix("self."))
        vars(part).setdefault(name, value)


def compute(
    kind: type[Any], case: Mapping[str, Any], reads: Reads, settings: Mapping[str, Any] | None = None
) -> tuple[float | str, set[str]]:
    """Return what TRL's own loss and its slope come to, or its error, and which known keys of the micro-batch it reads.

    Args:
        kind: TRL's trainer.
        case: What differs from the defaults.
        reads: Takes what the loss reads beside what is known.
        settings: The run's own, for options of a later release; TRL's defaults without them.
    """
    settings = _settings(None) if settings is None else settings
    logps, entropies, passed = LOGPS.clone().requires_grad_(), 1.5 + _wave(1.7), set[str]()
    rows = [torch.cat([INPUTS[f"prompt_{what}"], INPUTS[f"completion_{what}"]], dim=1) for what in ("ids", "mask")]

    def score(model: Any, tokens: Tensor, attention_mask: Tensor, length: int, *_: Any, **options: Any) -> Any:
        passed.update({"model", *options})
        if model is not MODEL or length != LENGTH or not all(map(torch.equal, (tokens, attention_mask), rows)):
            raise ValueError("it scores other tokens than those of its micro-batch")
        return logps, entropies, AUX if case.get("aux_loss_enabled") else None

    given = {**INPUTS, **(OF_RLOO if kind is RLOOTrainer else OF_GRPO), **_part(case, "inputs.")}
    while True:
        inputs = _Noted({name: value for name, value in given.items() if value is not None})
        trainer = _trainer(kind, case, score, settings, reads.attributes)
        _give(trainer, reads.attributes)
        found: float | str
        try:
            with torch.enable_grad():
                loss = kind._compute_loss(trainer, MODEL, inputs)
                (slope,) = torch.autograd.grad(loss, logps)
            found = float(loss.detach() + (_wave(0.31) * slope).sum())
        except AttributeError as error:
            if _answer(trainer, error, settings, reads.attributes):
                continue
            found = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what was seen
            found = f"{type(error).__name__}: {error}"
        break
    if not passed:
        return found, set()
    known = READ[kind] | {"num_items_in_batch"}
    reads.inputs |= inputs.asked - passed - known
    reads.handed |= (inputs.asked & passed) - HANDED - known
    return found, inputs.asked & known


def examine(
    kind: type[Any],
    loss_type: str = "",
    *,
    config: Any = None,
    values: bool = True,
    attributes: Mapping[str, Any] | None = None,
) -> tuple[str | None, Reads]:
    """Say what TRL's own loss does that it did not in the versions that were run, or None, and what it reads beside.

    Args:
        kind: TRL's trainer.
        loss_type: Its loss.
        config: The run's settings; None for TRL's defaults.
        values: Whether what it computes counts. If not, only its inputs do.
        attributes: Values of attributes that are known to be new, by their name in the loss.
    """
    cases, known = ([{}], (KNOWN_RLOO,)) if kind is RLOOTrainer else (CASES, KNOWN[loss_type])
    reads, settings = Reads(attributes=dict(attributes or {})), _settings(config)
    found = [compute(kind, {"loss_type": loss_type, **case}, reads, settings) for case in cases]
    for case, expected, (value, _) in zip(cases, known, found, strict=True):
        if isinstance(value, str) or (values and not abs(value - expected) < 1e-5):
            return _difference(case, value, expected, reads), reads
    if gone := sorted(READ[kind] - set().union(*(keys for _, keys in found))):
        return f"it no longer reads {', '.join(map(repr, gone))} of its inputs", reads
    return None, reads


def _difference(case: Mapping[str, Any], value: float | str, expected: float, reads: Reads) -> str:
    """Say in which case a loss differs, and what it reads there that is new."""
    given = {name: of.tolist() if isinstance(of, Tensor) else of for name, of in case.items()}
    what = ", ".join(f"{name}={of}" for name, of in given.items())
    seen = f"raises {value}" if isinstance(value, str) else f"comes to {value:.6f} instead of {expected:.6f}"
    new = [f"{key!r} of its inputs" for key in sorted(reads.inputs)]
    new += [f"{name}={of!r}" for name, of in sorted(reads.attributes.items())]
    beside = f"; it reads {' and '.join(new)}, which is new" if new else ""
    return f"with {what or 'made-up inputs'} it {seen}{beside}"


def check_loss(
    trainer: type[Any],
    block: MismatchConfig,
    loss_type: str,
    config: Any = None,
    attributes: Mapping[str, Any] | None = None,
) -> Reads:
    """Refuse sections inside TRL's own loss if that loss is not the one that was run, whatever its version and text.

    Args:
        trainer: The trainer's class.
        block: The block, with the sections that act.
        loss_type: The run's loss.
        config: The run's settings; None for TRL's defaults.
        attributes: Values of attributes that are known to be new, by their name in the loss.

    Returns:
        What the loss reads beside what is known; nothing if no section is inside of it.

    Raises:
        SeamError: The loss differs.
    """
    features = [feature for feature in block.features if feature.partition(".")[0] in IN_OBJECTIVE]
    kind = RLOOTrainer if issubclass(trainer, RLOOTrainer) else GRPOTrainer
    if not features:
        return Reads()
    change, reads = examine_sections(kind, features, loss_type, config, attributes)
    if change is not None:
        version = installed("trl")
        sections = " and ".join(dict.fromkeys(feature.partition(".")[0] for feature in features))
        raise SeamError(
            f"{named(features)}: {kind.__name__}._compute_loss of trl {version} is not the loss that this release was run with"
            f"{f' (loss_type={loss_type!r})' if loss_type else ''}: {change}. Remove {sections} from the block, or install a "
            f"version that was run (pip install trl=={PEERS['trl'].nearest(version)})."
        )
    return reads


def check_trainer(trainer: Any, block: MismatchConfig, reads: Reads) -> Reads:
    """Check the loss once more with a trainer's own attributes where the stand-in had none, as `check_loss` does.

    Args:
        trainer: The trainer, which has been built.
        block: The block, with the sections that act.
        reads: What the loss was found to read.
    """
    own = {path: _value_of(trainer, path) for path in reads.attributes}
    # Numbers, words and tensors alone: a function may talk to other ranks, and an object may count its calls.
    known = {path: value for path, value in own.items() if isinstance(value, bool | int | float | str | Tensor)}
    if not known:
        return reads
    loss_type = getattr(trainer.args, "loss_type", "")
    return check_loss(type(trainer), block, loss_type, trainer.args, reads.attributes | known)


def _value_of(trainer: Any, path: str) -> Any:
    """Return what a trainer has under a name in its loss, such as "self.args.new_option"; None if it has nothing."""
    value = trainer
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return value


def examine_sections(
    kind: type[Any],
    features: Sequence[str],
    loss_type: str,
    config: Any = None,
    attributes: Mapping[str, Any] | None = None,
) -> tuple[str | None, Reads]:
    """Return what `examine` finds that matters to some features of `IN_OBJECTIVE`."""
    sections = {feature.partition(".")[0] for feature in features}
    # The others change what is scored, not what is made of it.
    weighed = not sections.isdisjoint(("kl", "correction"))
    if kind is not RLOOTrainer and loss_type not in KNOWN:
        reads = Reads()
        change = f"loss_type={loss_type!r} is none of {', '.join(KNOWN)}, whose values are known" if weighed else None
    else:
        change, reads = examine(kind, loss_type, config=config, values=weighed, attributes=attributes)
    taken = sorted(key for key in reads.inputs | reads.handed if OURS.get(key) in sections)
    if change is None and taken:
        change = f"it reads {' and '.join(map(repr, taken))} of its inputs, where this package puts what is its own"
    return change, reads


if __name__ == "__main__":
    # The values of `KNOWN` for the installed version.
    for name in KNOWN:
        print(name, [round(float(compute(GRPOTrainer, {"loss_type": name, **case}, Reads())[0]), 6) for case in CASES])
