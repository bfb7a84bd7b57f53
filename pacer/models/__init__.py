"""Models: where they come from, how they are cut into layers, what their caches hold, and the parts trained here."""
