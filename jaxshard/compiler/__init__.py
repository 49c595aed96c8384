"""Ask the compilers of TPUs and GPUs about a program without the hardware, and keep what they compiled in files.

- `planned` and `topology` make meshes of chips that are not here, `gpus` describes GPUs to their compiler.
- `judge` compiles a program in a child process (`child`) until memory is assigned, and reads the compiler's `dump`.
- `executable` saves a compiled program as a file and loads it elsewhere; `trust` refuses files that others could write.

Imports `core/` and `cost/`; `training/`, `checks/`, `plan/` and `commands/` import it.
"""
