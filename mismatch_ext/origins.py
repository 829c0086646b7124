"""Which weights the engines of a run have, and which of them sampled each rollout of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mismatch_ext.errors import ProvenanceError
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
    """What an engine says of itself after a weight update.

    Args:
        name: What to call it in messages.
        reading: What it runs with.
        patch_digest: Digest of the patches that are active where it runs.
        weight_version: Version of its weights; None when it does not know.
    """

    name: str
    reading: EngineReading
    patch_digest: str
    weight_version: int | None


class Origins:
    """Follows the weights of a run's engines, and holds the rollouts of each batch to them.

    Args:
        sampling: Settings that the engines sample with.

    Attributes:
        present: Where a rollout that is sampled now comes from; None before the first weight update.
    """

    def __init__(self, sampling: SamplingSettings) -> None:
        self._sampling = sampling
        self.present: Provenance | None = None

    def sent(self, version: int, answers: Iterable[EngineAnswer]) -> Provenance:
        """Take what every engine says of itself after a weight update.

        Args:
            version: Version of the weights that were sent.
            answers: What the engines answered.

        Raises:
            RecordError: There is no engine.
            ProvenanceError: One has other weights, or runs with something else than the others or than before.
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
        """Refuse a batch of which a rollout is not of the weights that the engines have now.

        Args:
            rollouts: Each one's name, and versions of the weights at its first and last token; None when unknown.
            older: Accept rollouts of older weights, and of several, as an asynchronous host trains on.

        Raises:
            ProvenanceError: A rollout's origin is unknown, or it is of other weights; names it.
        """
        if older:
            return self._check_older(rollouts)
        found = one_provenance(
            (f"rollout {name}", sampled_by(name, self.present, first, last)) for name, first, last in rollouts
        )
        assert self.present is not None  # or the first rollout is refused
        expect_present(found, self.present.weight_version)
        return found

    def _check_older(self, rollouts: Iterable[tuple[str, int | None, int | None]]) -> Provenance:
        """Refuse rollouts of unknown weights, or of newer ones than the engines have."""
        found = []
        for name, first, last in rollouts:
            of = sampled_by(name, self.present, first, last, allow_mixed=True)
            assert self.present is not None and first is not None  # or it is refused
            found.append((name, replace(of, weight_version=self.present.weight_version)))
            if not first <= of.weight_version <= self.present.weight_version:
                raise ProvenanceError(
                    f"rollout {name} was sampled with weight_version={first} to {last}, and the engines have weight_version="
                    f"{self.present.weight_version}: versions rise, and none is ahead of the engines. Something has changed its "
                    "stamps, or it is of another run."
                )
        return one_provenance(found)


def sampled_by(
    name: str, provenance: Provenance | None, first: int | None, last: int | None, *, allow_mixed: bool = False
) -> Provenance:
    """Return the provenance of one rollout, of which an engine says between which versions of the weights it was sampled.

    Args:
        name: The rollout's name, for messages.
        provenance: What all rollouts of the engine have in common.
        first: Version of the weights at its first token; None when nobody says.
        last: Version at its last token.
        allow_mixed: Accept several versions, as partial rollouts have, and take the last.

    Raises:
        ProvenanceError: Its origin or a version is unknown, or several versions of the weights sampled it.
    """
    if provenance is None:
        raise ProvenanceError(unknown_origin(name, provenance))
    if first is None or last is None:
        raise ProvenanceError(unknown_origin(name, None, "weight version"))
    if first != last and not allow_mixed:
        raise ProvenanceError(
            f"rollouts of mixed provenance: rollout {name} was sampled with weight_version={first} and weight_version={last}; "
            "let no weight update come in between, or drop it."
        )
    return replace(provenance, weight_version=last)
