"""KL terms by exact enumeration: `python -m tests.oracles.kl` prints docs/kl.md."""
