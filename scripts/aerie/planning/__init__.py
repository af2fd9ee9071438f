"""The plan of a run, and the checks before it."""
