"""Data on its way to a model: prompts → corpus → labels → packed batches. Nothing here is fetched unasked."""
