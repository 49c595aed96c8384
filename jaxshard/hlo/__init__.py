"""Read the text of a compiled program (HLO): its operations, loops, collectives, and the user's lines they come from.

- `hlo` parses the text, `walk` lists what runs and how often, `dataflow` follows values and counts loop iterations,
  `source` finds the user's lines. An `operation` is the record that users see of one instruction.
- `found` (`js.collectives`) lists the collectives: `groups` maps replica groups to mesh axes, `asynchronous` pairs
  starts with ends, `overlap` tells whether a device waits.
- `trail` finds the argument that an array is, or the operation that computes it, and the operation that reads it;
  `origins` follows a value back to the arguments.

Imports `core/` at most; `checks/`, `plan/`, `profile/` and `commands/` import it.
"""
