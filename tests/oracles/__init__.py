"""Slow, exact answers that the package is held against."""
