"""Print the table of families: `python -m mismatch_ext.adapters.transformers.routing`."""

from mismatch_ext.adapters.transformers.routing.families import families_page

if __name__ == "__main__":
    print(families_page())
