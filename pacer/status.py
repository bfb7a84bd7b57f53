"""``python -m pacer.status FOLDER …``: what is done, running, stopped, failed or missing, and what finishes it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from pacer.command.app import program
from pacer.errors import ConfigError


@program
def main(words: list[str]) -> int:
    """Says how far the work in folders is (default: runs); 1 where something is left that a command finishes."""
    from pacer.work.standing import GOES_ON, STATES, survey

    if wrong := [word for word in words if word.startswith("-") or "=" in word]:
        raise ConfigError("status takes folders", value=wrong[0], remedy="python -m pacer.status runs")
    found = [standing for word in words or ["runs"] for standing in survey(Path(word))]
    for standing in found:
        print(f"{standing.state:8} {standing.where}" + (f"  ({standing.detail})" if standing.detail else ""))
        if standing.command:
            print(f"         {standing.command}")
    counts = Counter(standing.state for standing in found)
    print(", ".join(f"{counts[state]} {state}" for state in reversed(STATES) if counts[state]) or "nothing here")
    return int(any(counts[state] for state in GOES_ON))


if __name__ == "__main__":
    sys.exit(main(None))
