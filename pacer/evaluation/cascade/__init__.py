"""The cost model of self-speculation: what LayerSkip and HiSpec do at any exits, by one forward per text and a profile.

`table` (what every exit would say along the target's own greedy texts) → `walk` (the rounds that follow from it) →
`costs` (what they take) → `search` (the best exits and buffers). `theory` is the closed form with coins in place of
texts, `profile` measures the prices.

**What is assumed.** The exits' choices are known on the target's own text alone. In greedy decoding that is enough for
every *token* of any method here: what a stage writes after it has left the text is lost at the next stage above. What
such a stretch *costs* depends on how long the exits go on agreeing with each other off the text; they are taken to
agree there as often as at the same places on it. So tokens per target pass are exact (up to near-ties of logits), and
layer-tokens and speed are modelled.
"""
