"""The largest sizes that are accepted: a wrong number in a file or flag is refused before it fills the memory."""

LARGEST_SIZE = 2**31 - 1
"""The largest dimension, number of rows, window or token id: what an int32 index can count."""

MOST_LISTED = 2**20
"""The largest number of devices of a program or blocks of a model, which are listed one by one in Python."""


def is_too_large(error: BaseException) -> bool:
    """Return True for the errors of Python and its libraries about data that no machine can hold or process.

    They are OverflowError, MemoryError and the panic of a library in Rust: this is no `Exception`, and its class can't
    be imported.
    """
    return isinstance(error, OverflowError | MemoryError) or type(error).__name__ == "PanicException"
