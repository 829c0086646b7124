"""Replay of routing in a tiny random model of every family."""
