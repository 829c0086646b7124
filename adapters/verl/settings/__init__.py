"""The driver before Ray starts: from the block to verl's own settings, and what is refused."""
