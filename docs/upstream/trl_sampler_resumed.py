"""A resumed GRPO run draws the order of its first epoch again: TRL's sampler starts from the seed, whatever epoch it is."""

from trl.trainer.utils import RepeatSampler

PEER = "trl"
REPORTED = "not reported"
WORKAROUND = "`CheckpointMixin._shuffle_on` (adapters/trl/checkpoint.py) draws the orders of the epochs that are done"


def sampler() -> RepeatSampler:
    """Return the sampler that GRPOTrainer builds, over eight prompts."""
    return RepeatSampler(range(8), mini_repeat_count=1, seed=42)


whole = sampler()
FIRST, EXPECTED = list(whole), str(list(whole))


def seen(resume=lambda resumed: None) -> str:
    """Return the order of the second epoch in a run that was resumed before it."""
    resumed = sampler()
    resume(resumed)
    return str(list(resumed))


def with_workaround() -> str:
    """Resume as this package's trainer does."""
    from types import SimpleNamespace as Of

    from mismatch_ext.adapters.trl.checkpoint import CheckpointMixin

    done = Of(args=Of(ignore_data_skip=False), state=Of(epoch=1.0))
    return seen(lambda resumed: CheckpointMixin._shuffle_on(Of(_train_sampler=resumed, **vars(done))))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
