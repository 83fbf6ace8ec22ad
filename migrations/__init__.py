"""The database schema, step by step. `service.schema` runs it; the tables' meaning stands in each package's `store.py`."""
