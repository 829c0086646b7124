"""The weights that the engines of a run have, and the weights that sampled each rollout of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mismatch_ext.errors import RecordError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.provenance import (
    Provenance,
    SamplingSettings,
    expect_present,
    one_provenance,
    to_provenance,
    unknown_origin,
)


@dataclass(frozen=True, kw_only=True)
class EngineAnswer:
    """An engine's report about itself after a weight update.

    Args:
        name: What to call the engine in messages.
        reading: The settings that the engine runs with.
        patch_digest: Digest of the patches that are active in the engine's process.
        weight_version: Version of the engine's weights; None if the engine does not know it.
    """

    name: str
    reading: EngineReading
    patch_digest: str
    weight_version: int | None


class Origins:
    """Follows the weights of a run's engines, and checks that the rollouts of each batch come from these weights.

    Args:
        sampling: Settings that the engines sample with.

    Attributes:
        present: Provenance of a rollout that is sampled now; None before the first weight update.
    """

    def __init__(self, sampling: SamplingSettings) -> None:
        self._sampling = sampling
        self.present: Provenance | None = None

    def sent(self, version: int, answers: Iterable[EngineAnswer]) -> Provenance:
        """Take every engine's report after a weight update, and return the engines' provenance.

        Args:
            version: Version of the weights that were sent.
            answers: The engines' reports.

        Raises:
            RecordError: There is no engine.
            RecordError: An engine has other weights, or its settings differ from the other engines' or from before.
        """
        found = []
        for answer in answers:
            digest, stamp, name = answer.patch_digest, answer.weight_version, f"of {answer.name}"
            of = to_provenance(answer.reading, sampling=self._sampling, weight_version=version, patch_digest=digest)
            found.append((name, sampled_by(name, of, stamp, stamp)))
        now = one_provenance(found)
        expect_present(now, version, "engines with weights")
        if self.present is not None:
            one_provenance([("the run so far", replace(self.present, weight_version=version)), ("the run", now)])
        self.present = now
        return now

    def check(self, rollouts: Iterable[tuple[str, int | None, int | None]], *, older: bool = False) -> Provenance:
        """Return the provenance of a batch; refuse the batch if a rollout was not sampled by the engines' present weights.

        Args:
            rollouts: Name of each rollout, and the versions of the weights at its first and last token; None if unknown.
            older: Accept rollouts of older weights, and of several versions, because an asynchronous host trains on them.

        Raises:
            RecordError: A rollout's origin is unknown, or other weights sampled it; names the rollout.
        """
        if older:
            return self._check_older(rollouts)
        found = one_provenance(
            (f"rollout {name}", sampled_by(name, self.present, first, last)) for name, first, last in rollouts
        )
        assert self.present is not None  # otherwise the first rollout was refused
        expect_present(found, self.present.weight_version)
        return found

    def _check_older(self, rollouts: Iterable[tuple[str, int | None, int | None]]) -> Provenance:
        """Refuse rollouts of unknown weights, or of newer weights than the engines have."""
        found = []
        for name, first, last in rollouts:
            of = sampled_by(name, self.present, first, last, allow_mixed=True)
            assert self.present is not None and first is not None  # otherwise it was refused
            found.append((name, replace(of, weight_version=self.present.weight_version)))
            if not first <= of.weight_version <= self.present.weight_version:
                raise RecordError(
                    f"rollout {name} was sampled with weight_version={first} to {last}, and the engines have weight_version="
                    f"{self.present.weight_version}: versions rise, and none is ahead of the engines. Something has changed its "
                    "stamps, or it is of another run."
                )
        return one_provenance(found)


def sampled_by(
    name: str, provenance: Provenance | None, first: int | None, last: int | None, *, allow_mixed: bool = False
) -> Provenance:
    """Return the provenance of one rollout, from the versions of the weights that its engine reports.

    Args:
        name: The rollout's name, for messages.
        provenance: The part that all rollouts of the engine have in common.
        first: Version of the weights at the rollout's first token; None if nobody says.
        last: Version at the rollout's last token; None if nobody says.
        allow_mixed: Accept several versions, as partial rollouts have, and take the last.

    Raises:
        RecordError: The origin or a version is unknown, or several versions of the weights sampled the rollout.
    """
    if provenance is None:
        raise RecordError(unknown_origin(name, provenance))
    if first is None or last is None:
        raise RecordError(unknown_origin(name, None, "weight version"))
    if first != last and not allow_mixed:
        raise RecordError(
            f"rollouts of mixed provenance: rollout {name} was sampled with weight_version={first} and weight_version={last}; "
            "let no weight update come in between, or drop it."
        )
    return replace(provenance, weight_version=last)
