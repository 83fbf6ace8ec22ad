"""The edge of the house: processes, HTTP, command line, settings and wiring. Nothing imports it."""
