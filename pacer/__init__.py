"""Pacer: a research framework for speculative decoding.

How much faster can a target model decode without changing its output, by which method, and why? Verbs run as
``python -m pacer.<verb>`` (train, evaluate, generate, profile, …); the parts they put together live in
``pacer.models``, ``pacer.decoding``, ``pacer.data``, ``pacer.training``, ``pacer.evaluation`` and ``pacer.reporting``.
"""

from __future__ import annotations

__version__ = "0.1.0"
