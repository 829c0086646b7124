"""Declared monkey-patches, one file per upstream symbol. Importing them changes nothing. See README.md here."""
