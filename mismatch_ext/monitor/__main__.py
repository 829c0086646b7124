"""`python -m mismatch_ext.monitor`: print the built-in alarms."""

from mismatch_ext.monitor.defaults import table

if __name__ == "__main__":
    print(table())
