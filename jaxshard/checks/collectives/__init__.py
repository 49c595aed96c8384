"""Derive the collectives that a layout promises, read those of a compiled program, and compare both.

- `promise` (`js.plan.promise`) derives them from a layout, an engine and a loss. `weight_uses` counts how often the
  loss uses each weight, `parameters` and `expected` are the records that are counted, `compiler_choices` and
  `forbidden` list the collectives that a compiler may and must not add.
- `found` (`js.collectives`) reads them from a compiled program. `hlo` parses its text, `asynchronous` pairs starts with
  ends, `dataflow` follows values and counts loop iterations, `groups` maps replica groups to mesh axes, `source` finds
  the user's lines. An `operation` is the record that users see of one instruction.
- `trail` finds the argument that an array is, or the operation that computes it, and the operation that reads it:
  `origins` follows a value back to the arguments, `cause` explains in words what is moved and why.
- `compare` (`js.audit`) matches both sides with `matching`, and `comparison` writes the result. `surprise` explains a
  collective that nothing promised and gives advice, grouped by source line. `programs/` gives its result in the same
  form.

Imports what `checks/` imports.
"""
