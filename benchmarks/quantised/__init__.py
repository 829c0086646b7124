"""What a quantised engine costs: the gap by format, its causes, what correction leaves, and growth of the error."""
