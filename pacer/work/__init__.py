"""Long work: who does which part of it, how far it is, and how it stops."""
