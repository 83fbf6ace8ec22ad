"""The other site as the witness of a site's audit log: it co-signs each checkpoint that continues what it saw before."""
