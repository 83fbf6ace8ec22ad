"""The transparency log: durable intents, RFC 6962 tree, signed checkpoints, offline verification."""
