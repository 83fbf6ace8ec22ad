"""The log process: sequences intents and signs checkpoints."""
