"""What one GPU shows of the gap, in one command: `python -m benchmarks.gpu`."""
