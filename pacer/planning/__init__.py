"""What a verb would do, without doing it: ``dry_run=true``."""
