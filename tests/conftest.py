"""Fixtures for every test: real parts, each in its own file."""

pytest_plugins = ["postgres_fixture"]
