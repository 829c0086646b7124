"""A resumed GRPO run draws the order of its first epoch again: TRL's sampler starts from the seed, whatever epoch it is."""

from trl.trainer.utils import RepeatSampler

PEER = "trl"
REPORTED = "not reported"
WORKAROUND = "none of ours: draw the orders of the epochs that are done from the sampler before you train"


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
    """Draw the order of the first epoch again first."""
    return seen(lambda resumed: next(iter(resumed)))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
