"""Fixtures for every test: real parts, each in its own file.

They are plugins, so that a session has one of each: importing a fixture into a test module would make another one of it.
"""

pytest_plugins = ["postgres_fixture", "hsm_fixtures", "house", "installation"]
