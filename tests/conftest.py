"""Fixtures for every test: real parts, each in its own file.

They are plugins, so that a session has one of each: importing a fixture into a test module would make another one of it.
"""

import os

# Before anything imports the ONNX Runtime, which would report to its maker (voiceprints.models.require_no_telemetry).
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

pytest_plugins = ["postgres_fixture", "hsm_fixtures", "house", "installation", "spoken", "split_tokens"]
