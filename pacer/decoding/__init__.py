"""One loop, three parts: a drafter proposes, a controller says when to stop, verification says what survives.

Nothing here knows of files, training or Hydra.
"""
