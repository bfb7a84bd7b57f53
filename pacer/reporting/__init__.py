"""Reports from results: tables and plots."""
