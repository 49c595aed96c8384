"""The verdict of a TPU's or GPU's compiler on a training step: memory, collectives, cycles, or what it refused and why.

- `compile_for` makes the step for a topology that is not here, compiles it, and returns a `Verdict`.
- `dump` reads the memory that the compiler assigned, `live` names what is alive at the fullest moment, `refusal` reads
  an error of the compiler, `savings` says what would help, `cycles` adds up the compiler's estimates.

Imports what `plan/` imports.
"""
