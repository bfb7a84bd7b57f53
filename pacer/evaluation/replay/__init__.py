"""Replay: what any controller would have done on the target's own greedy texts, exact in tokens, priced by a profile.

`table` (what the draft would propose everywhere) → `rules` (how far a controller drafts) → `walk` (the rounds a decoder
would really make) → `costs` (what they take) → `search` (the best values) and `evidence` (what the signals know).
"""
