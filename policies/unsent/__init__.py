"""Which rows of who may do what the other site is still to be told of."""
