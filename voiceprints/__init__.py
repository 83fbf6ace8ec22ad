"""Encrypted speaker embeddings: measured from speech, sealed in the token, opened only for a grant."""
