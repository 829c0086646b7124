"""One sub-package per peer: translates its types into ours and back, holds no maths.

Imported as `mismatch_ext.adapters`; importing a sub-package imports its peer.
"""
