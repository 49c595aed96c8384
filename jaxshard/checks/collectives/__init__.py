"""The collectives that a layout promises, those found in a compiled program, and both compared.

- `promise` (`js.plan.promise`) derives them from a layout, an engine and a loss. `weight_uses` counts how often the
  loss uses each weight, `parameters` and `expected` are what is counted, `compiler_choices` and `forbidden` say what a
  compiler may and must not add.
- `found` (`js.collectives`) reads them out of a compiled program. `hlo` parses its text, `asynchronous` knows what is
  started and ended apart, `dataflow` follows values and counts the iterations of loops, `groups` turns replica groups
  into mesh axes, `source` finds the user's lines. An `operation` is what users see of one instruction.
- `trail` says of every array which argument it is or what computes it, and what reads it: `origins` follows a value
  back to the arguments, `cause` writes what is moved and why.
- `compare` (`js.audit`) matches both, by way of `matching`, and `comparison` writes the result; `surprise` says of a
  collective that nothing promised why it is there and what to write, and groups many by source line. `programs/` gives
  its result in the same form.

Imports what `checks/` imports.
"""
