"""Warn of collectives that the compiler inserted into a branch or loop in which devices may take different paths.

A traced program has the collectives that engines, layers and users write. Those that the compiler inserts for automatic
axes (`js.tensor`) are only in the compiled program, and may be inside a conditional whose branch depends on the device
(`proofs/parting.py`). That is harmless over the automatic axes alone, except for a permute, in which all devices of the
mesh take part.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from jax.sharding import Mesh
from jax.stages import Compiled

from jaxshard.hlo import hlo
from jaxshard.hlo.found import locate
from jaxshard.hlo.source import find_source
from jaxshard.proofs.parting import Choice


def warn_of_inserted(choices: Sequence[Choice], compiled: Compiled, mesh: Mesh) -> None:
    """Warn of each branch or loop that devices may decide differently and in which the compiler put a collective.

    Args:
      choices: the branches and loops of the traced program that devices may decide differently.
      compiled: the compiled program; its text is read only if there are such choices.
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
