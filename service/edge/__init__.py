"""The TLS front: request shapes and audio decoding. Holds no PIN, no database, no voice."""
