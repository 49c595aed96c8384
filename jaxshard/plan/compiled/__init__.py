"""Ask a TPU's or GPU's compiler for memory, collectives and cycles of a training step, without the hardware.

- `compile_for` makes the step for a topology, compiles it up to the assignment of memory, and returns a `Verdict`.
- `dump` reads the memory that the compiler assigned, `live` names the arrays that are live at the peak, `refusal` reads
  the compiler's out-of-memory error, `savings` lists changes that save memory, `cycles` adds up estimated cycles.

Imports what `plan/` imports.
"""
