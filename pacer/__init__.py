"""Pacer: a research framework for speculative decoding.

How much faster can a target model decode without changing its output, by which method, and why? Verbs run as
``python -m pacer.<verb>`` (train, evaluate, generate, profile, …); the parts they put together live in
``pacer.models``, ``pacer.decoding``, ``pacer.data``, ``pacer.training``, ``pacer.evaluation`` and ``pacer.reporting``.
In Python: ``pacer.load("pacer/smollm2").generate(["Why is the sky blue?"])``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pacer.api import Generation, Pacer, load

__all__ = ["Generation", "Pacer", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What `pacer.api` offers, imported when it is asked for: torch takes seconds, and a verb that only checks its
    words does without."""
    if name not in __all__:
        raise AttributeError(f"module 'pacer' has no attribute {name!r}")
    from pacer import api

    return getattr(api, name)
