"""The `evaluate` module `humaneval_pass`."""
