"""Controllers: when to stop drafting. A new rule is a new file here and a yaml in ``conf/controller``."""
