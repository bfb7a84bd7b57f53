"""Drafters: what to propose."""
