"""Print the page of KL configurations: `python -m mismatch_ext.kl > docs/kl.md`."""

from mismatch_ext.kl.conformance import conformance_page

if __name__ == "__main__":
    print(conformance_page())
