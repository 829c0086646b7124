"""What TRL's own loss does for this package's terms and weights, by properties: without a model and before an engine is built.

Text can't tell whether a loss still does it: an edited comment changes nothing, and a function that the loss calls may change
everything. So TRL's loss is computed on three short made-up responses, and its slopes are compared. Each section asks for what it
relies on (`PROPERTIES`), and nothing else that TRL's loss does matters here.

A later release may read more than the tested ones did. The loss is then computed without that, and what is new is named.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from mismatch_ext.adapters.trl.aggregation import FAR_BELOW, token_weights
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import SeamError
from mismatch_ext.seams import named
from mismatch_ext.versions import PEERS, installed

IN_OBJECTIVE = ("kl", "correction", "sampling_mask", "routing")
"""Sections whose effect is inside TRL's own loss. All need it to score the tokens of its micro-batch."""
DEFAULT_LOSS: str = GRPOConfig.loss_type
LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "cispo", "dapo", "vespo", "luspo")
"""Loss types whose denominators and ratios are known."""

ROWS, LENGTH = 3, 4
MODEL = object()


def _wave(step: float, scale: float = 1.0) -> Tensor:
    """Return numbers without a pattern, the same on every machine `[B, T]`."""
    return scale * torch.sin(step * torch.arange(1.0, ROWS * LENGTH + 1, dtype=torch.float64)).view(ROWS, LENGTH)


# Whatever torch's default device is: the loss is asked in the host's memory.
with torch.device("cpu"):
    LOGPS = _wave(1.3, 0.4) - 2
    ONES = torch.ones_like(LOGPS)
    POSITIONS = torch.arange(LENGTH)
    INPUTS: dict[str, Tensor] = {
        "prompt_ids": torch.arange(6).view(ROWS, 2),
        "prompt_mask": (torch.arange(6) > 0).view(ROWS, 2).long(),
        "completion_ids": torch.arange(12, 24).view(ROWS, LENGTH),
        "completion_mask": (POSITIONS < torch.tensor([[4], [2], [3]])).long(),
        "advantages": torch.tensor([1.0, -0.7, 0.3], dtype=torch.float64),
    }
    OF_GRPO = {
        "old_per_token_logps": LOGPS - _wave(2.1, 0.3),
        "sampling_per_token_logps": LOGPS - _wave(0.7, 0.2),
        "ref_per_token_logps": LOGPS - _wave(1.9, 0.5),
        "importance_sampling_ratio": 1 + _wave(2.9, 0.3),
        "num_items_in_batch": torch.tensor(9.0, dtype=torch.float64),
    }
    OF_RLOO = {"old_logps": LOGPS.sum(1)}
    TOOL_MASK = (POSITIONS != torch.tensor([[1], [4], [0]])).long()
    ONLY_ONE = (POSITIONS < torch.tensor([[1], [0], [0]])).long()
KNOWN_INPUTS = {
    *INPUTS, *OF_GRPO, *OF_RLOO, "tool_mask", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask",
    "spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
}  # fmt: skip
"""Keys of the micro-batch that the tested versions read."""
KNOWN_SETTINGS = """
    beta loss_type epsilon_low epsilon_high delta importance_sampling_level off_policy_mask_threshold top_entropy_quantile
    temperature use_vllm vllm_importance_sampling_correction use_bias_correction_kl max_completion_length steps_per_generation
    entropy_coef sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
""".split()
"""Settings that they read, of the trainer or of its arguments. The run's own values count, unless `stand_in` has another."""

Case = Mapping[str, Any]
"""What differs from the defaults of `stand_in` ("args.delta") and from the inputs above; None leaves an input out."""
SEQUENCES: Case = {"importance_sampling_level": "sequence"}
UNWEIGHED: Case = {"inputs.importance_sampling_ratio": ONES}
FAR_OFF: Case = {"off_policy_mask_threshold": 0.02}
TWICE: Case = {"current_gradient_accumulation_steps": 2}
OF_WEIGHTS: Case = {
    "beta": 1.0,
    "inputs.advantages": torch.zeros(ROWS, device="cpu"),
    "inputs.ref_per_token_logps": FAR_BELOW * ONES,
}
"""The case whose slopes are the weights of tokens: no policy term, and a KL term of slope 1."""
ONE_TOKEN: Case = {"inputs.completion_mask": ONLY_ONE, "inputs.num_items_in_batch": torch.ones((), device="cpu")}
NO_TOKEN: Case = {"inputs.completion_mask": 0 * ONLY_ONE, "inputs.num_items_in_batch": torch.zeros((), device="cpu")}


class Batch(UserDict[str, Any]):
    """A micro-batch that notes which of its keys a loss asks for."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.asked: set[str] = set()
        super().__init__(given)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


class Unchanged:
    """Stands for what an accelerator has: a function that returns what it is given, and false."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, value: Any = None, *_: Any, **__: Any) -> Any:
        return value


Answer = Callable[[str], Any]
"""Returns what a loss gets for an attribute that the tested versions do not read."""


class Part:
    """What a loss reads attributes from: known ones, and those that a later release reads beside them, which are noted."""

    def __init__(self, path: str, given: Mapping[str, Any], answer: Answer, new: set[str]) -> None:
        vars(self).update(given)
        self._path, self._answer, self._new = path, answer, new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for those itself
            raise AttributeError(name)
        value = self._answer(name)
        if name not in KNOWN_SETTINGS:
            self._new.add(f"{self._path}.{name}")
        return value


def stand_in(kind: type[Any], case: Case, score: Any = None, config: Any = None, new: set[str] | None = None) -> Any:
    """Return a trainer that has nothing but what its loss reads.

    Args:
        kind: TRL's trainer.
        case: What differs from the settings here.
        score: Its scoring pass.
        config: The run's settings; None for TRL's defaults.
        new: Takes the names of what a later release reads beside what is known.
    """
    settings, new = _settings(config), set() if new is None else new
    # CISPO clips the ratio itself, the others its distance from 1.
    epsilon_high = 1.15 if case.get("loss_type") == "cispo" else 0.15
    own: dict[str, Any] = dict(
        beta=0.0, epsilon_low=0.1, epsilon_high=epsilon_high, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", use_vllm=True, vllm_importance_sampling_correction=True,
    )  # fmt: skip
    # What is no setting.
    own |= dict(
        aux_loss_enabled=False, _entropy_bonus_enabled=False, use_adaptive_entropy=False, current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)), _get_per_token_logps_and_entropies=score,
    )  # fmt: skip
    own |= {name: value for name, value in case.items() if "." not in name}
    args = dict(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    accelerator: dict[str, Any] = dict.fromkeys(
        ("gather", "gather_for_metrics", "reduce", "pad_across_processes"), Unchanged()
    )
    accelerator |= dict(num_processes=1, sync_gradients=True, device=torch.device("cpu"))

    parts: tuple[tuple[str, dict[str, Any], Answer], ...] = (
        ("args", args, settings.get),
        ("accelerator", accelerator, lambda name: Unchanged()),
        ("state", dict(global_step=0), lambda name: None),
        ("model", dict(training=True), lambda name: None),
    )
    for part, given, answer in parts:
        own[part] = Part(f"self.{part}", given | _of_part(case, part), answer, new)
    # TRL's trainers take settings over under their own names.
    trainer: Any = object.__new__(type("StandIn", (Part, kind), {}))
    Part.__init__(trainer, "self", own, settings.get, new)
    return trainer


def _of_part(case: Case, part: str) -> dict[str, Any]:
    start = f"{part}."
    return {key.removeprefix(start): value for key, value in case.items() if key.startswith(start)}


def _settings(config: Any) -> Mapping[str, Any]:
    """Return a run's own settings, or TRL's defaults without a run."""
    if config is not None:
        settings: dict[str, Any] = vars(config)
        return settings
    return {one.name: one.default for one in fields(GRPOConfig) if one.default is not MISSING}


class Changed(Exception):
    """TRL's loss lacks a property. Its text says which one, and in which case."""


@dataclass(frozen=True)
class Slopes:
    """The slopes of TRL's loss in each log-probability `[B, T]`, and what it was computed with."""

    trainer: Any
    inputs: Mapping[str, Any]
    of_logps: Tensor

    @property
    def weights(self) -> Tensor:
        """Return what each token weighs in the loss, by the denominator of its type `[B, T]`."""
        return token_weights(self.trainer, self.inputs, torch.float64)

    @property
    def policy(self) -> Tensor:
        """Return the slopes of the policy term while the policy has not moved: -weight * advantage `[B, T]`."""
        advantages: Tensor = self.inputs["advantages"]
        return -self.weights * (advantages if advantages.dim() == 2 else advantages[:, None])


class Probe:
    """Computes TRL's own loss on made-up inputs, one case after the other.

    Attributes:
        new: What the loss reads beside what is known.
    """

    def __init__(self, kind: type[Any], loss_type: str, config: Any) -> None:
        self.loss_type, self.new = loss_type, set[str]()
        self._kind, self._config = kind, config

    def slopes(self, case: Case) -> Slopes:
        """Compute the loss in a case, and its slopes.

        Raises:
            Changed: The loss raises an error, or scores other tokens than those of its micro-batch.
        """
        kind = self._kind
        given = {**INPUTS, **(OF_RLOO if kind is RLOOTrainer else OF_GRPO), **_of_part(case, "inputs")}
        inputs = Batch({name: value for name, value in given.items() if value is not None})
        logps = LOGPS.clone().requires_grad_()

        def score(model: Any, tokens: Tensor, attention_mask: Tensor, length: int, *_: Any, **__: Any) -> Any:
            ids, mask = (
                torch.cat([given[f"prompt_{part}"], given[f"completion_{part}"]], dim=1) for part in ("ids", "mask")
            )
            same = torch.equal(tokens, ids) and torch.equal(attention_mask, mask)
            if model is not MODEL or length != LENGTH or not same:
                raise ValueError("it scores other tokens than those of its micro-batch")
            return logps, ONES, None

        trainer = stand_in(kind, {"loss_type": self.loss_type, **case}, score, self._config, self.new)
        try:
            with torch.enable_grad():
                loss = kind._compute_loss(trainer, MODEL, inputs)
                (slopes,) = torch.autograd.grad(loss, logps, materialize_grads=True)
        except Exception as error:  # whatever it is, it is what was seen
            raise Changed(f"raises {type(error).__name__}: {error}{_described(case)}") from error
        finally:
            self.new.update(f"inputs[{key!r}]" for key in inputs.asked - KNOWN_INPUTS)
        return Slopes(trainer, inputs.data, slopes)

    def expect(self, found: Tensor, wanted: Tensor, case: Case, lost: str) -> None:
        """Compare slopes with those that a property asks for.

        Raises:
            Changed: They differ; `lost` says what TRL no longer does.
        """
        if torch.allclose(found, wanted, rtol=1e-4, atol=1e-7):
            return
        worst = int((found - wanted).abs().nan_to_num(nan=torch.inf).argmax())
        values = f"a slope is {found.flatten()[worst]:.5g} instead of {wanted.flatten()[worst]:.5g}"
        raise Changed(f"no longer {lost}: {values}{_described(case)}")


def _described(case: Case) -> str:
    """Name what a case sets, numbers with their values."""
    given = [name if isinstance(value, Tensor) else f"{name}={value}" for name, value in case.items()]
    return f" with {', '.join(given)}" if given else ""


def scores_its_tokens(probe: Probe) -> None:
    """The loss is of one scoring pass over the tokens of its micro-batch: routes and masks are found by them."""
    probe.slopes({})


def weighs_by_denominator(probe: Probe) -> None:
    """A trained token weighs 1 over its type's denominator and a masked one 0: our terms are weighed so."""
    cases: tuple[Case, ...] = (
        {},
        TWICE,
        {**TWICE, "model.training": False},
        {**TWICE, "args.steps_per_generation": 4},
        {"accelerator.num_processes": 2},
        {"inputs.tool_mask": TOOL_MASK},
        ONE_TOKEN,
        NO_TOKEN,
    )
    for case in cases:
        slopes = probe.slopes({**case, **OF_WEIGHTS})
        probe.expect(slopes.of_logps, slopes.weights, case, "weighs tokens by the denominator of its loss type")


def adds_kl(probe: Probe) -> None:
    """The KL term is added to the policy term, and no ratio, filter or advantage multiplies it: `kl` replaces it so."""
    slope_of_kl = 1 - (OF_GRPO["ref_per_token_logps"] - LOGPS).exp()
    cases: tuple[Case, ...] = ({}, SEQUENCES, FAR_OFF, {"top_entropy_quantile": 0.3})
    for case in cases:
        without, slopes = probe.slopes(case), probe.slopes({**case, "beta": 0.1})
        added = slopes.of_logps - without.of_logps
        probe.expect(added, 0.1 * slopes.weights * slope_of_kl, case, "adds beta times the KL to each token's loss")


def follows_ratio(probe: Probe) -> None:
    """The policy term has the ratio to `old_per_token_logps`, limited by its type: `bypass` puts the engine's there."""
    on_policy: Case = {**UNWEIGHED, "inputs.old_per_token_logps": LOGPS}
    cases: tuple[Case, ...] = (
        {},
        SEQUENCES,
        {**SEQUENCES, **ONE_TOKEN},
        {"inputs.tool_mask": TOOL_MASK},
        {"inputs.old_per_token_logps": None},
        {"inputs.advantages": _wave(0.9)},
    )
    for case in cases:
        slopes = probe.slopes({**on_policy, **case})
        lost = "follows the policy gradient while the policy has not moved"
        probe.expect(slopes.of_logps, slopes.policy, case, lost)
    if probe.loss_type in ("sapo", "vespo"):
        return  # whose weights are smooth
    ratio = (LOGPS - OF_GRPO["old_per_token_logps"]).exp()
    for case in ({}, {"inputs.advantages": -ONES}):
        slopes = probe.slopes({**UNWEIGHED, **case})
        trainer, falling = slopes.trainer, slopes.policy > 0
        if probe.loss_type == "cispo":
            limited = ratio.clamp(max=trainer.epsilon_high)
        else:
            too_high = ~falling & (ratio > 1 + trainer.epsilon_high)
            too_low = falling & (ratio < 1 - trainer.epsilon_low)
            limited = ratio.masked_fill(too_high | too_low, 0)
        lost = "limits the ratio to the old policy as its loss type does"
        probe.expect(slopes.of_logps, slopes.policy * limited, case, lost)


def multiplies_by_ratio(probe: Probe) -> None:
    """`importance_sampling_ratio` multiplies the slope of each token: `correction` puts its weights there.

    vespo has it inside of a weight without a slope. There it acts as the ratio to the old policy does.
    """
    plain = probe.slopes(UNWEIGHED).of_logps
    of_tokens = torch.where(INPUTS["completion_mask"].bool(), OF_GRPO["importance_sampling_ratio"], 1.0)
    if probe.loss_type == "vespo":
        weighed = probe.slopes({"inputs.importance_sampling_ratio": of_tokens}).of_logps
        nearer = OF_GRPO["old_per_token_logps"] - of_tokens.log()
        wanted = probe.slopes({**UNWEIGHED, "inputs.old_per_token_logps": nearer}).of_logps
        probe.expect(weighed, wanted, {}, "takes importance_sampling_ratio for part of its ratio")
        return
    of_rows = torch.tensor([[1.2], [0.7], [0.0]], dtype=torch.float64)
    by_row = probe.slopes({**SEQUENCES, **UNWEIGHED}).of_logps
    for case, ratio, unweighed in (({}, of_tokens, plain), ({}, of_rows, plain), (SEQUENCES, of_rows, by_row)):
        weighed = probe.slopes({**case, "inputs.importance_sampling_ratio": ratio}).of_logps
        lost = "multiplies each token's loss by importance_sampling_ratio"
        probe.expect(weighed, unweighed * ratio, case, lost)


def filters_policy_term(probe: Probe) -> None:
    """A threshold leaves out the policy term of bad responses that are further off: the `opsm` preset sets it."""
    mask = INPUTS["completion_mask"]
    distance = ((OF_GRPO["sampling_per_token_logps"] - LOGPS) * mask).sum(1) / mask.sum(1)
    near, middle, far = distance.sort().values.tolist()
    good_and_bad = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)
    for advantages in (-torch.ones_like(distance), good_and_bad):
        for threshold in ((near + middle) / 2, (middle + far) / 2):
            case: Case = {**UNWEIGHED, "inputs.advantages": advantages}
            limited: Case = {**case, "off_policy_mask_threshold": threshold}
            stays = (advantages >= 0) | (distance <= threshold)
            wanted = probe.slopes(case).of_logps * stays[:, None]
            lost = "leaves out the policy term of responses beyond off_policy_mask_threshold"
            probe.expect(probe.slopes(limited).of_logps, wanted, limited, lost)


def needs_no_ratio_when_off(probe: Probe) -> None:
    """Without TRL's correction a batch has no ratio, and no token is weighed: a correction that is off relies on it."""
    case: Case = {"vllm_importance_sampling_correction": False, "inputs.importance_sampling_ratio": None}
    unweighed, slopes = probe.slopes(UNWEIGHED), probe.slopes(case)
    probe.expect(slopes.of_logps, unweighed.of_logps, case, "leaves tokens alone if its own correction is off")


PROPERTIES: dict[str, tuple[Callable[[Probe], None], ...]] = {
    "kl": (weighs_by_denominator, adds_kl),
    "correction": (
        weighs_by_denominator,
        follows_ratio,
        multiplies_by_ratio,
        filters_policy_term,
        needs_no_ratio_when_off,
    ),
}
"""What each section needs of GRPO's loss. The others change what is scored, and not what is made of it."""


def examine(
    kind: type[Any], sections: Iterable[str], loss_type: str, config: Any = None
) -> tuple[str | None, str | None]:
    """Say what TRL's own loss no longer does for some sections, and what it reads beside what is known; None for nothing.

    Args:
        kind: TRL's trainer.
        sections: Some of `IN_OBJECTIVE`.
        loss_type: Its loss; "" for RLOO's.
        config: The run's settings; None for TRL's defaults.
    """
    needed = dict.fromkeys(one for section in sections for one in PROPERTIES.get(section, ()))
    if kind is RLOOTrainer:
        needed = {}  # no section has a term or a weight there
    elif loss_type not in LOSS_TYPES:
        return f"has a loss type that is none of the known {', '.join(LOSS_TYPES)}" if needed else None, None
    probe = Probe(kind, loss_type, config)
    change = None
    try:
        with torch.device("cpu"):
            for has_property in (scores_its_tokens, *needed):
                has_property(probe)
    except Changed as lost:
        change = str(lost)
    if not probe.new:
        return change, None
    names = " and ".join(sorted(probe.new))
    if change is not None:
        return f"{change}; it reads {names}, which is new", None
    return None, (
        f"The loss of trl {installed('trl')} reads {names}, which no tested version does. What the loss does with it is not "
        "known here, and was not looked at; without it, the loss does what this package relies on."
    )


def check_loss(trainer: type[Any], block: MismatchConfig, loss_type: str, config: Any = None) -> str | None:
    """Refuse sections inside TRL's own loss if that loss no longer does what they rely on, whatever its version and text.

    Args:
        trainer: The trainer's class.
        block: The block, with the sections that act.
        loss_type: The run's loss.
        config: The run's settings; None for TRL's defaults.

    Returns:
        A warning that names what the loss reads beside what is known; None if there is nothing.

    Raises:
        SeamError: The loss lacks a property.
    """
    features = [feature for feature in block.features if feature.partition(".")[0] in IN_OBJECTIVE]
    if not features:
        return None
    kind = RLOOTrainer if issubclass(trainer, RLOOTrainer) else GRPOTrainer
    sections = list(dict.fromkeys(feature.partition(".")[0] for feature in features))
    change, added = examine(kind, sections, loss_type, config)
    if change is not None:
        version = installed("trl")
        tested = PEERS["trl"].nearest(version)
        raise SeamError(
            f"{named(features)}: {kind.__name__}._compute_loss of trl {version} (loss_type={loss_type!r}) {change}. Remove "
            f"{' and '.join(sections)} from the config, or install a tested version (pip install trl=={tested})."
        )
    return added
