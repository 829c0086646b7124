"""Code that runs in the processes of a `vllm serve` that has this package installed; `remote.py` calls it over HTTP."""
