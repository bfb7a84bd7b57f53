"""The `evaluate` module `gsm8k_answer`."""
