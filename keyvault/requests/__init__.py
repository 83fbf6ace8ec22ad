"""Requests for officers' approval, as they lie in the database."""
