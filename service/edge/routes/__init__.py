"""HTTP routes of the edge, one file a resource."""
