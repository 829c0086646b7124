"""Replay of routing in a tiny random model of every family: `python -m tests.oracles.routing` prints the table."""
