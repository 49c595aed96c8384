"""Collectives that the compiler put into a branch or loop on which devices may decide differently.

A traced program has the collectives that engines, layers and users write; what the compiler adds for axes that it
handles itself (`js.tensor`) only the compiled one has. There it may stand in a conditional of which the trace says that
devices take different branches (`proofs/parting.py`). Over its own axes alone that is harmless, but for a permute: all
devices of the mesh take part in that.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from jax.sharding import Mesh
from jax.stages import Compiled

from jaxshard.checks.collectives import hlo
from jaxshard.checks.collectives.found import locate
from jaxshard.checks.collectives.source import find_source
from jaxshard.proofs.parting import Choice


def warn_of_inserted(choices: Sequence[Choice], compiled: Compiled, mesh: Mesh) -> None:
    """Warn of each line at which devices may part ways and the compiled program communicates.

    Args:
      choices: of the traced program; without any nothing is read.
      compiled: the program.
      mesh: the mesh it was compiled for.
    """
    located = locate(hlo.parse(compiled.as_text() or ""), mesh) if choices else ()
    deciding = ("conditional", "while")
    decided = [
        ({find_source(scope, op).line for scope, op in executed.scope.callers if op.opcode in deciding}, one)
        for executed, one in located
    ]
    for choice in choices:
        inside = [one for lines, one in decided if choice.line in lines]
        waits = [one for one in inside if one.kind == "collective-permute" or choice.differ & set(one.axes)]
        if not waits:
            continue
        kinds = ", ".join(sorted({one.title for one in waits}))
        warnings.warn(
            f"{choice.line}: devices may decide differently over {sorted(choice.differ)}, and the compiler put "
            f"collectives inside, in which others wait for them ({kinds}): the step could hang. Compute it before the "
            f"branch and choose by jnp.where, or decide by jax.lax.pmax(predicate, {tuple(sorted(choice.differ))})",
            stacklevel=3,
        )
