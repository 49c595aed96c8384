"""Search the layouts of a model on a topology, pruned by memory and ranked by time: `js.plan.search`.

- `candidates` lists them: sizes of axes, strategy, engine, micro-batches and remat.
- `facts` measures the model, and `estimate` bounds the memory and time of a candidate by these facts, without tracing.
- `search` predicts the best candidates, compiles a few if asked, and returns a `Ranking`; `reasons` explains each rank.

Imports what `plan/` imports.
"""
