"""Print the page of metrics: `python -m mismatch_ext.metrics > docs/metrics.md`."""

from mismatch_ext.metrics.names import table

if __name__ == "__main__":
    print(table())
