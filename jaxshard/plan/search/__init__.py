"""The search for a layout: every way to split a model over a topology, pruned by memory and ranked by time.

- `candidates` lists the ways: sizes of axes, strategy, engine, micro-batches and remat.
- `facts` reads from the model what decides between them, `estimate` bounds memory and time by it, without tracing.
- `search` predicts the best of them, compiles a few if asked, and returns a `Ranking`; `reasons` says why in sentences.

Imports what `plan/` imports.
"""
