"""A package, so that mypy tells its conftest.py from that of the folder above."""
