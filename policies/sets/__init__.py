"""Sets of policies: their exact bytes, which one officers activated, and the engine that decides by it."""
