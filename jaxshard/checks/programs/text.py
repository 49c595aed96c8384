"""Parse the HLO text of a compiled program; refuse any other text by name."""

from __future__ import annotations

import graphlib
import re

from jaxshard.hlo import hlo

_HOW = (
    "give what jax.jit(step).lower(...).compile().as_text() returns, or the file *after_optimizations.txt that "
    "XLA_FLAGS=--xla_dump_to=FOLDER writes"
)
_KINDS = {
    r"\b(?:stablehlo|mhlo)\.|^module @": "StableHLO, of a program that is not compiled: it has no collectives yet",
    r"\A\{ lambda": "a jaxpr, of a program that is traced and not compiled",
    r"BufferAssignment": "a buffer assignment: take the file next to it without -buffer-assignment in its name",
}
"""Words for other texts that users pass by mistake, by a pattern that recognises the text."""


def parse_program(data: bytes) -> hlo.Module:
    """Parse the text of a compiled program.

    Raises:
      ValueError: the data is something else, such as StableHLO or a binary file; the message says what.
    """
    try:
        text = data.decode().lstrip("\ufeff \t\r\n")
    except UnicodeDecodeError as error:
        kind = "a gzip file: unpack it" if data.startswith(b"\x1f\x8b") else "binary, as the .pb files of a dump are"
        raise ValueError(f"this is no text (but {kind}); {_HOW}") from error
    if not text:
        raise ValueError(f"the file is empty; {_HOW}")
    if not text.startswith("HloModule"):
        kinds = (kind for pattern, kind in _KINDS.items() if re.search(pattern, text[:4000], re.MULTILINE))
        raise ValueError(f"this is {next(kinds, f'no HLO text: it starts with {text[:40]!r}')}; {_HOW}")
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "this is HLO before the compiler's last passes (its first line does not say is_scheduled=true), in which "
            f"collectives are still missing; {_HOW}"
        )
    try:
        module = hlo.parse(text)
        _check_complete(text, module)
    except (IndexError, KeyError) as error:
        raise ValueError(f"the HLO text is damaged: {error!r}") from error
    return module


def _check_complete(text: str, module: hlo.Module) -> None:
    """Raise ValueError if the text ends too early: a line is cut off, or a called computation is missing.

    Also raise it for a computation that calls itself.
    """
    for computation in module.computations.values():
        for name, line in computation.lines.items():
            if line.count("(") != line.count(")"):  # in free text there may be any
                computation[name]  # parses it
    last = text.rstrip().rpartition("\n")[2]
    missing = sorted(set().union(*module.calls.values()) - module.computations.keys())
    if not module.entry:
        why = "it has no ENTRY"
    elif missing:
        why = f"it lacks the computation {missing[0]}"
    elif last != "}" and not last.startswith("}, execution_thread="):
        why = f"it ends with {last[:60]!r}"
    else:
        try:
            graphlib.TopologicalSorter(module.calls).prepare()
        except graphlib.CycleError as error:
            raise ValueError(f"the HLO text is damaged: the computation {error.args[1][0]} calls itself") from error
        return
    raise ValueError(f"the text is cut off: {why}; write the whole program to the file")
