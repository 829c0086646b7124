"""Independent references: each rule once more, in loops over Python numbers, using nothing of the package."""
