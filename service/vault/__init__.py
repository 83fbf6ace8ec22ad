"""The vault process: the only place where a voiceprint is in the clear."""
