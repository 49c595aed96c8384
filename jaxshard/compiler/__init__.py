"""Ask the compilers of TPUs and GPUs about a program without the hardware: topologies, and the memory they assign.

Imports `core/` and `cost/`; `plan/` and `commands/` import it.
"""
