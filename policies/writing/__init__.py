"""How rows of who may do what are written, and listed as changed."""
