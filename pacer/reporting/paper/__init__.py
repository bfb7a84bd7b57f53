"""The papers' tables: what is published beside what was measured here, both with their sources."""
