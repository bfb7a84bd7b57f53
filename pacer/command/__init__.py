"""From a command line to typed settings, on this machine or as jobs of a sweep."""
