"""Repairs: for each surprise of an audit the edit that removes it, tried by compiling.

- `edits` are the values that say what to change: a constraint in the loss, a rule of `js.tensor`, the engine. Each is
  written as the code that a user would write, and can be applied without touching a file.
- `parts` are the parts of a training step that edits are applied to, `rewrite` runs a traced loss with some of its
  equations changed.
- `propose` derives edits from a surprise (`cuts` and `unordered` read the loss for it), `repair` (`js.plan.repair`)
  tries them, `result` is what it returns.

Imports what `plan/` imports.
"""
