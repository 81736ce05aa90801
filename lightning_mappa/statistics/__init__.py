"""Intervals and tests for figures of a few dozen problems and a handful of seeds."""
