"""Evaluation: tasks, scores, metrics and statistics."""
