"""The `evaluate` module `rouge_lsum`."""
