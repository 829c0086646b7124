"""The stacks that people have: an environment each, what runs there, and the page that says what came out.

`cells.py` declares them, `environment.py` builds one of them beside `.venv` from `requirements/stacks/`, `session.py` runs its
tests inside it and writes `evidence/stacks/NAME.json`, and `page.py` makes docs/compatibility.md and the README's table of
those files.
"""
