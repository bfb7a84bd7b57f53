"""What libraries say while a verb runs: errors and our own lines, no notices."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = (
    "transformers",
    "datasets",
    "evaluate",
    "lightning",
    "lightning.pytorch",
    "lightning.fabric",
    "lightning.pytorch.utilities.rank_zero",  # its parent's level is set again when Lightning is imported
    "lightning.fabric.utilities.rank_zero",
    "httpx",
    "httpcore",
    "filelock",
    "fsspec",
    "matplotlib",
    "absl",
    "rouge_score",
    "huggingface_hub",
    "urllib3",
    "torch",
)
_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_SILENT": "true",
    "MPLBACKEND": "Agg",  # plots are files; no display is needed
}


@contextmanager
def quiet_libraries(loud: bool = False) -> Iterator[None]:
    """Silence libraries' notices and warnings inside the block; what the user set in the environment wins.

    Logging is as before after the block, whatever was configured inside.

    Args:
        loud: change nothing.
    """
    if loud:
        yield
        return
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)  # read by libraries that are imported later
    root = logging.getLogger()
    handlers, root_level = list(root.handlers), root.level
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(?!pacer\b)")
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(root_level)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for name in added:
            os.environ.pop(name, None)
