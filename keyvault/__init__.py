"""Hardware keys for voiceprints: made, wrapped, used and destroyed inside a PKCS#11 token."""
