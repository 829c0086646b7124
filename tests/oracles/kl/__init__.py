"""KL terms by exact enumeration."""
