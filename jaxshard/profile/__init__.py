"""Read the traces that JAX's profiler wrote: the time of each step, exposed collectives, and gaps.

A trace becomes operations of devices and events of the host (`trace.py`), the compiled programs in it say what each
operation is (`programs.py`), and the rest is arithmetic with spans of time (`spans.py`, `read.py`).

Imports `core/` and `hlo/`.
"""
