"""Print the page of KL configurations: `python -m tests.oracles.kl > docs/kl.md`."""

from tests.oracles.kl.conformance import conformance_page

if __name__ == "__main__":
    print(conformance_page())
