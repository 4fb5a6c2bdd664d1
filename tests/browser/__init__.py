"""Tests in a real browser, which `make test-browser` runs."""
