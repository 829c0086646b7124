"""Planted faults: one small patch each, and the tests that must notice it."""
