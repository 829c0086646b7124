"""One sub-package per peer. It translates the peer's types into ours and back, and holds no maths.

Imported as `mismatch_ext.adapters`; importing a sub-package imports its peer.
"""
