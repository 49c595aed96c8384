"""Derive the collectives that a layout promises, and compare them with those of a compiled program.

- `promise` (`js.plan.promise`) derives them from a layout, an engine and a loss. `weight_uses` counts how often the
  loss uses each weight, `parameters` and `expected` are the records that are counted, `compiler_choices` and
  `forbidden` list the collectives that a compiler may and must not add. `hlo/` reads those of the compiled program.
- `compare` (`js.audit`) matches both sides with `matching`, and `comparison` writes the result. `cause` explains in
  words what is moved and why, `surprise` a collective that nothing promised, with advice, grouped by source line.
  `programs/` gives its result in the same form.

Imports what `checks/` imports.
"""
