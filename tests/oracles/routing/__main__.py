"""Print the table of families: `python -m tests.oracles.routing`."""

from tests.oracles.routing.families import families_page

if __name__ == "__main__":
    print(families_page())
