"""Guard a step against silent regressions: record what a compiled program does in a file, and compare it later.

- `subject` is what is guarded: a jitted function or a `js.Step` with its arguments, or the text of a compiled program.
- `measure` compiles it for a target and makes a `snapshot`: collectives by axis, kind, role and array; arguments;
  memory; FLOPs; instructions.
- `file` keeps the snapshots of all targets, one line for each fact; `changes` compares two snapshots and describes
  each difference in a sentence; `guard` is `js.guard`.

Imports what `plan/` imports.
"""
