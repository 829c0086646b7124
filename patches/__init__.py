"""Declared monkey-patches, one file per upstream symbol; nothing happens at import. See README.md here."""
