"""Versions of the signing keys: made, published, used and ended with an overlap."""
