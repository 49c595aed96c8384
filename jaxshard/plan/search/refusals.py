"""Errors that mean "this layout can't do that", and those that mean a fault."""

from __future__ import annotations

import dis

from jaxshard.core.our_code import is_jaxshard_file


def is_refusal(error: Exception) -> bool:
    """Return True for an error by which a check says what a layout can't do.

    Those are ValueErrors, and other errors that a `raise` of this package made. A TypeError that Python or JAX found in
    the middle of a computation is a fault.
    """
    if isinstance(error, ValueError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return is_jaxshard_file(code.co_filename) and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
