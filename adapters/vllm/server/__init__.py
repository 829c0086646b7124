"""What runs in the processes of a `vllm serve`, where this package is installed beside it; `remote.py` asks it over HTTP."""
