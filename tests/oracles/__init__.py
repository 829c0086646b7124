"""Slow, exact answers that the package is held against, and that the pages of docs/ are printed from."""
