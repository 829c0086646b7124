"""What TRL's own loss does for this package's terms and weights, by properties: without a model and before an engine is built.

The terms of a `mismatch` config are added to this loss and weighed as it weighs its own. Text can't tell whether that still
works: an edited comment changes nothing, and a function that the loss calls may change everything. So the loss is computed on
three short made-up responses, and each function of `PROPERTIES` compares slopes that this package relies on.

A later release may read more than the tested ones did. The loss is then computed without that: what it computes decides. An
input that batches may have is compared once more when one has it (`Objective.expect_known_inputs`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.trl.aggregation import FAR_BELOW, mask_of_loss, token_weights
from mismatch_ext.adapters.trl.kl import BASELINE
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import SeamError
from mismatch_ext.seams import named
from mismatch_ext.versions import PEERS, installed

IN_OBJECTIVE = ("kl", "correction", "sampling_mask", "routing")
"""Sections whose effect is inside TRL's own loss."""

DEFAULT_LOSS: str = GRPOConfig.loss_type
LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "cispo", "dapo", "vespo", "luspo")
"""Loss types whose denominators and ratios are known."""

ROWS, LENGTH = 3, 4
MODEL = object()
PARTS = ("args", "accelerator", "state", "model")
"""Objects of a trainer that its loss reads from."""


def _wave(step: float, scale: float = 1.0) -> Tensor:
    """Return numbers without a pattern, the same on every machine `[B, T]`."""
    return scale * torch.sin(step * torch.arange(1.0, ROWS * LENGTH + 1, dtype=torch.float64)).view(ROWS, LENGTH)


# Whatever torch's default device is: the loss is asked in the host's memory.
with torch.device("cpu"):
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
    ENTROPIES = 1.5 + _wave(1.7)
    AUX = torch.tensor(0.7, dtype=torch.float64)
    ONES = torch.ones_like(LOGPS)
    TOOL_MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
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
OURS = {BASELINE: "kl"}
"""Keys of the micro-batch that are this package's, and their sections."""

Case = Mapping[str, Any]
"""What differs from the defaults of `_trainer` ("args.delta") and from the inputs above; None leaves an input out."""
SEQUENCES: Case = {"importance_sampling_level": "sequence"}
UNWEIGHED: Case = {"inputs.importance_sampling_ratio": ONES}
TWICE: Case = {"current_gradient_accumulation_steps": 2}
with torch.device("cpu"):
    ONE_TOKEN: Case = {"inputs.completion_mask": torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])}
    NO_TOKEN: Case = {"inputs.completion_mask": torch.zeros(ROWS, LENGTH, dtype=torch.long)}


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
        inputs: Keys of the micro-batch. A batch may lack each of them, and then the loss has the properties.
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
            "known inputs it still does what this package relies on."
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


class Changed(Exception):
    """TRL's loss lacks a property. Its text says which one, and in which case."""


@dataclass(frozen=True)
class Slopes:
    """The slopes of TRL's loss in one case, and the trainer and the inputs that it was computed with."""

    trainer: Any
    inputs: Mapping[str, Any]
    of_logps: Tensor
    of_entropies: Tensor
    of_aux: Tensor

    @property
    def mask(self) -> Tensor:
        """Return 1 where a token is trained on, 0 elsewhere `[B, T]`."""
        return mask_of_loss(self.inputs).double()

    @property
    def accumulated(self) -> float:
        """Return how many micro-batches are summed up to one step; 1 in an evaluation."""
        return float(self.trainer.current_gradient_accumulation_steps) if self.trainer.model.training else 1.0

    @property
    def advantages(self) -> Tensor:
        """Return the advantages `[B, 1]` or `[B, T]`."""
        advantages: Tensor = self.inputs["advantages"]
        return advantages if advantages.dim() == 2 else advantages[:, None]

    @property
    def weights(self) -> Tensor:
        """Return what each token weighs in the loss, by the denominator of its type `[B, T]`."""
        return token_weights(self.trainer, self.inputs, torch.float64)


class Probe:
    """Computes TRL's own loss on made-up inputs, one case after the other.

    Attributes:
        reads: What the loss reads beside what is known.
        asked: Known keys of the micro-batch that the loss has read in any case.
    """

    def __init__(
        self, kind: type[Any], loss_type: str, settings: Mapping[str, Any], reads: Reads, weighed: bool
    ) -> None:
        self.loss_type, self.reads, self.asked = loss_type, reads, set[str]()
        self._kind, self._settings, self._weighed = kind, settings, weighed

    def slopes(self, case: Case) -> Slopes:
        """Compute the loss in a case, and its slopes.

        Raises:
            Changed: The loss raises an error, or scores other tokens than those of its micro-batch.
        """
        kind, attributes = self._kind, self.reads.attributes
        given = {**INPUTS, **(OF_RLOO if kind is RLOOTrainer else OF_GRPO), **_part(case, "inputs.")}
        leaves = [tensor.clone().requires_grad_() for tensor in (LOGPS, ENTROPIES, AUX)]
        passed = set[str]()

        def score(model: Any, tokens: Tensor, attention_mask: Tensor, length: int, *_: Any, **options: Any) -> Any:
            passed.update({"model", *options})
            rows = [
                torch.cat([given[f"prompt_{what}"], given[f"completion_{what}"]], dim=1) for what in ("ids", "mask")
            ]
            if model is not MODEL or length != LENGTH or not all(map(torch.equal, (tokens, attention_mask), rows)):
                raise ValueError("it scores other tokens than those of its micro-batch")
            logps, entropies, aux = leaves
            return logps, entropies, aux if case.get("aux_loss_enabled") else None

        while True:
            inputs = _Noted({name: value for name, value in given.items() if value is not None})
            trainer = _trainer(kind, {"loss_type": self.loss_type, **case}, score, self._settings, attributes)
            _give(trainer, attributes)
            try:
                with torch.enable_grad():
                    loss = kind._compute_loss(trainer, MODEL, inputs)
                    slopes = torch.autograd.grad(loss, leaves, materialize_grads=True)
                error = None
            except Exception as raised:  # noqa: BLE001 - whatever it is, it is what was seen
                error = raised
            if not isinstance(error, AttributeError) or not _answer(trainer, error, self._settings, attributes):
                break
        self._note(inputs.asked, passed)
        if error is not None:
            raise Changed(f"raises {type(error).__name__}: {error}{_described(case)}{self._new()}")
        return Slopes(trainer, dict(inputs), *slopes)

    def _note(self, asked: set[str], passed: set[str]) -> None:
        """Note which keys of the micro-batch a loss has read, once it has scored its tokens."""
        if not passed:
            return
        known = READ[self._kind] | {"num_items_in_batch"}
        self.asked |= asked & known
        self.reads.inputs |= asked - passed - known
        self.reads.handed |= (asked & passed) - HANDED - known

    def expect(self, found: Tensor, wanted: Tensor, case: Case, lost: str) -> None:
        """Compare slopes with those that a property asks for.

        Raises:
            Changed: They differ; `lost` says what TRL no longer does.
        """
        if not self._weighed or torch.allclose(found, wanted, rtol=1e-4, atol=1e-7):
            return
        distances = (found - wanted).abs().nan_to_num(nan=torch.inf)
        worst = int(distances.argmax())
        values = f"a slope is {found.flatten()[worst]:.5g} instead of {wanted.flatten()[worst]:.5g}"
        raise Changed(f"no longer {lost}: {values}{_described(case)}{self._new()}")

    def _new(self) -> str:
        """Say what the loss reads that is new."""
        new = [f"{key!r} of its inputs" for key in sorted(self.reads.inputs)]
        new += [f"{name}={value!r}" for name, value in sorted(self.reads.attributes.items())]
        return f"; it reads {' and '.join(new)}, which is new" if new else ""


def _described(case: Case) -> str:
    """Name what a case sets, numbers with their values."""
    given = [name if isinstance(value, Tensor) else f"{name}={value}" for name, value in case.items()]
    return f" with {', '.join(given)}" if given else ""


def weighs_by_denominator(probe: Probe) -> None:
    """A trained token weighs 1 over its type's denominator and a masked one 0: `kl` and `reinforce` read their weights so."""
    unit = {
        "beta": 1.0,
        "inputs.advantages": torch.zeros(ROWS),
        "inputs.ref_per_token_logps": torch.full_like(LOGPS, FAR_BELOW),
    }
    cases: list[Case] = [
        {},
        TWICE,
        {**TWICE, "model.training": False},
        {**TWICE, "args.steps_per_generation": 4},
        {"accelerator.num_processes": 2},
        {"inputs.tool_mask": TOOL_MASK},
        {**ONE_TOKEN, "inputs.num_items_in_batch": torch.tensor(1.0)},
        {**NO_TOKEN, "inputs.num_items_in_batch": torch.tensor(0.0)},
    ]
    for case in cases:
        slopes = probe.slopes({**case, **unit})
        probe.expect(slopes.of_logps, slopes.weights, case, "weighs tokens by the denominator of its loss type")


def is_policy_gradient(probe: Probe) -> None:
    """On-policy, a token's slope is -weight * advantage: `reinforce` puts a term of its own in that place."""
    on_policy: Case = {**UNWEIGHED, "inputs.old_per_token_logps": LOGPS}
    cases: list[Case] = [
        {},
        SEQUENCES,
        {"inputs.tool_mask": TOOL_MASK},
        {**SEQUENCES, "inputs.tool_mask": TOOL_MASK},
        {**SEQUENCES, **ONE_TOKEN},
        {"inputs.old_per_token_logps": None},
        {"inputs.advantages": _wave(0.9)},
        {"inputs.advantages": torch.zeros(ROWS, dtype=torch.float64)},
    ]
    for case in cases:
        slopes = probe.slopes({**on_policy, **case})
        wanted = -slopes.weights * slopes.advantages
        probe.expect(slopes.of_logps, wanted, case, "follows the policy gradient while the policy has not moved")


def multiplies_by_ratio(probe: Probe) -> None:
    """`importance_sampling_ratio` multiplies the slope of each token: `correction` puts its weights there.

    vespo has it inside of a weight without a slope. There it acts as the ratio to the old policy does.
    """
    lost = "multiplies each token's loss by importance_sampling_ratio"
    plain = probe.slopes(UNWEIGHED).of_logps
    off: Case = {"vllm_importance_sampling_correction": False, "inputs.importance_sampling_ratio": None}
    probe.expect(probe.slopes(off).of_logps, plain, off, "leaves each token's loss alone where correction is off")
    of_tokens = torch.where(INPUTS["completion_mask"].bool(), OF_GRPO["importance_sampling_ratio"], 1.0)
    of_rows = torch.tensor([[1.2], [0.7], [0.0]], dtype=torch.float64)
    if probe.loss_type == "vespo":
        nearer: Case = {**UNWEIGHED, "inputs.old_per_token_logps": OF_GRPO["old_per_token_logps"] - of_tokens.log()}
        weighed = probe.slopes({"inputs.importance_sampling_ratio": of_tokens}).of_logps
        probe.expect(
            weighed, probe.slopes(nearer).of_logps, {}, "takes importance_sampling_ratio for part of its ratio"
        )
        rejected = probe.slopes({"inputs.importance_sampling_ratio": of_rows}).of_logps[2]
        probe.expect(
            rejected, torch.zeros_like(rejected), {}, "leaves out a response whose importance_sampling_ratio is 0"
        )
        return
    by_row = probe.slopes({**SEQUENCES, **UNWEIGHED}).of_logps
    for case, ratio, unweighed in (({}, of_tokens, plain), ({}, of_rows, plain), (SEQUENCES, of_rows, by_row)):
        weighed = probe.slopes({**case, "inputs.importance_sampling_ratio": ratio}).of_logps
        probe.expect(weighed, unweighed * ratio, case, lost)


def limits_ratio(probe: Probe) -> None:
    """Off-policy, the loss type limits the ratio to the old policy: `bypass` puts the engine's ratio there."""
    lost = "limits the ratio to the old policy as its loss type does"
    if probe.loss_type in ("sapo", "vespo"):  # with a smooth weight that ends at 0
        far: Case = {**UNWEIGHED, "inputs.old_per_token_logps": LOGPS - 5, "inputs.advantages": ONES}
        probe.expect(probe.slopes(far).of_logps, torch.zeros_like(LOGPS), far, lost)
        return
    negative = {"inputs.advantages": -ONES}
    cases: list[Case] = [{}, SEQUENCES, negative, {**negative, "args.delta": 1.25}]
    for case in cases:
        slopes = probe.slopes({**UNWEIGHED, **case})
        wanted = -slopes.weights * slopes.advantages * _limited(slopes)
        probe.expect(slopes.of_logps, wanted, case, lost)


def _limited(slopes: Slopes) -> Tensor:
    """Return what remains of the ratio to the old policy `[B, T]` or `[B, 1]`, by clipping or cispo's cap."""
    trainer, mask = slopes.trainer, slopes.mask
    logs = LOGPS - slopes.inputs["old_per_token_logps"]
    if trainer.importance_sampling_level == "sequence":
        logs = (logs * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    ratio: Tensor = logs.exp()
    if trainer.loss_type == "cispo":
        return ratio.clamp(max=trainer.epsilon_high)
    positive = slopes.advantages > 0
    highest = torch.inf if trainer.args.delta is None else trainer.args.delta
    too_high = ratio > torch.where(positive, 1 + trainer.epsilon_high, highest)
    too_low = ~positive & (ratio < 1 - trainer.epsilon_low)
    return ratio.masked_fill(too_high | too_low, 0)


def filters_policy_term(probe: Probe) -> None:
    """TRL's own filters take whole tokens out of the policy term: `correction` sets the off-policy one."""
    mask = INPUTS["completion_mask"].bool()
    plain = probe.slopes({}).of_logps
    quantile: Case = {"top_entropy_quantile": 0.3}
    high = mask & (torch.quantile(ENTROPIES[mask], 0.7) <= ENTROPIES)
    probe.expect(
        probe.slopes(quantile).of_logps, plain * high, quantile, "trains on the tokens of highest entropy alone"
    )
    # A response is dropped if its advantage is negative and the engine is far from the policy: here the second alone.
    signs: Case = {"inputs.advantages": torch.tensor([1.0, -0.7, -0.3], dtype=torch.float64)}
    far = LOGPS + torch.tensor([[0.1, 0.1, 0.1, 0.1], [0.1, 0.1, -9, -9], [0, 0, 0, 9]])  # masked tokens don't count
    drop: Case = {**signs, "off_policy_mask_threshold": 0.02, "inputs.sampling_per_token_logps": far}
    kept = probe.slopes(signs).of_logps * torch.tensor([[1], [0], [1]])
    probe.expect(probe.slopes(drop).of_logps, kept, drop, "drops far responses with a negative advantage alone")


def adds_kl(probe: Probe) -> None:
    """The KL term is added to the policy term, and no ratio, filter or advantage multiplies it: `kl` replaces it so."""
    kl: Case = {"beta": 0.1}
    lost = "adds beta times the KL to each token's loss"
    log_ratio = OF_GRPO["ref_per_token_logps"] - LOGPS
    slope_of_kl = 1 - log_ratio.exp()
    cases: list[Case] = [{}, SEQUENCES, {"top_entropy_quantile": 0.3}, {"off_policy_mask_threshold": 0.02}]
    for case in cases:
        without, slopes = probe.slopes(case), probe.slopes({**case, **kl})
        added = slopes.of_logps - without.of_logps
        probe.expect(added, 0.1 * slopes.weights * slope_of_kl, {**case, **kl}, lost)
    # TRL's own bias correction multiplies the KL by the ratio to the old policy, which has a slope too.
    corrected: Case = {**kl, "args.use_bias_correction_kl": True}
    slopes = probe.slopes(corrected)
    added = slopes.of_logps - probe.slopes({}).of_logps
    ratio = (LOGPS - OF_GRPO["old_per_token_logps"]).exp()
    of_kl = log_ratio.exp() - log_ratio - 1
    probe.expect(added, 0.1 * slopes.weights * ratio * (slope_of_kl + of_kl), corrected, lost)


def adds_own_terms(probe: Probe) -> None:
    """TRL's entropy bonus and router loss stay the same share of a step, whatever is added beside them."""
    cases: list[Case] = [{}, TWICE, {**TWICE, "model.training": False}, ONE_TOKEN, NO_TOKEN]
    for case in cases:
        bonus: Case = {**case, "_entropy_bonus_enabled": True, "entropy_coef": 0.1}
        slopes = probe.slopes(bonus)
        of_entropies = -0.1 * slopes.mask / slopes.mask.sum().clamp(min=1) / slopes.accumulated
        probe.expect(slopes.of_entropies, of_entropies, bonus, "adds its entropy bonus with its coefficient")
        router: Case = {**case, "aux_loss_enabled": True, "router_aux_loss_coef": 0.1}
        of_aux = torch.full_like(AUX, 0.1 / slopes.accumulated)
        probe.expect(probe.slopes(router).of_aux, of_aux, router, "adds its router loss with its coefficient")


PROPERTIES = (
    weighs_by_denominator,
    is_policy_gradient,
    multiplies_by_ratio,
    limits_ratio,
    filters_policy_term,
    adds_kl,
    adds_own_terms,
)


def examine(
    kind: type[Any],
    loss_type: str = "",
    *,
    config: Any = None,
    values: bool = True,
    attributes: Mapping[str, Any] | None = None,
) -> tuple[str | None, Reads]:
    """Say what TRL's own loss no longer does, or None, and what it reads beside what is known.

    Args:
        kind: TRL's trainer.
        loss_type: Its loss.
        config: The run's settings; None for TRL's defaults.
        values: Whether what it computes counts. If not, only its inputs and the tokens that it scores do.
        attributes: Values of attributes that are known to be new, by their name in the loss.
    """
    reads = Reads(attributes=dict(attributes or {}))
    probe = Probe(kind, loss_type, _settings(config), reads, values)
    try:
        with torch.device("cpu"):
            if kind is RLOOTrainer:
                probe.slopes({})  # no section adds a term to this loss
            else:
                for property_of_loss in PROPERTIES:
                    property_of_loss(probe)
    except Changed as change:
        return str(change), reads
    if unread := sorted(READ[kind] - probe.asked):
        return f"no longer reads {', '.join(map(repr, unread))} of its inputs", reads
    return None, reads


def check_loss(
    trainer: type[Any],
    block: MismatchConfig,
    loss_type: str,
    config: Any = None,
    attributes: Mapping[str, Any] | None = None,
) -> Reads:
    """Refuse sections inside TRL's own loss if that loss no longer does what they rely on, whatever its version and text.

    Args:
        trainer: The trainer's class.
        block: The block, with the sections that act.
        loss_type: The run's loss.
        config: The run's settings; None for TRL's defaults.
        attributes: Values of attributes that are known to be new, by their name in the loss.

    Returns:
        What the loss reads beside what is known; nothing if no section is inside of it.

    Raises:
        SeamError: The loss lacks a property.
    """
    features = [feature for feature in block.features if feature.partition(".")[0] in IN_OBJECTIVE]
    kind = RLOOTrainer if issubclass(trainer, RLOOTrainer) else GRPOTrainer
    if not features:
        return Reads()
    change, reads = examine_sections(kind, features, loss_type, config, attributes)
    if change is not None:
        version = installed("trl")
        sections = " and ".join(dict.fromkeys(feature.partition(".")[0] for feature in features))
        of_type = f" (loss_type={loss_type!r})" if loss_type else ""
        raise SeamError(
            f"{named(features)}: {kind.__name__}._compute_loss of trl {version}{of_type} {change}. Remove {sections} from the "
            f"config, or install a tested version (pip install trl=={PEERS['trl'].nearest(version)})."
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
    if kind is not RLOOTrainer and loss_type not in LOSS_TYPES:
        reads = Reads()
        change = f"has a loss type that is none of the known {', '.join(LOSS_TYPES)}" if weighed else None
    else:
        change, reads = examine(kind, loss_type, config=config, values=weighed, attributes=attributes)
    taken = sorted(key for key in reads.inputs | reads.handed if OURS.get(key) in sections)
    if change is None and taken:
        change = f"reads {' and '.join(map(repr, taken))} of its inputs, where this package puts its own"
    return change, reads
