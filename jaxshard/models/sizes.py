"""All ready-made models by name, and `make`, which builds a model by its name."""

from typing import Any

from jaxshard.models.gpt import SIZES as GPT_SIZES
from jaxshard.models.llama import SIZES as LLAMA_SIZES
from jaxshard.models.moe import SIZES as MOE_SIZES
from jaxshard.models.recipe import Size

SIZES: dict[str, Size] = GPT_SIZES | LLAMA_SIZES | MOE_SIZES
"""Every ready-made size; `SIZES["gpt2"].recipe` says how it is trained.

Example:
    model = js.models.SIZES["gpt2"].model(depth=4)      # as js.models.make("gpt2", depth=4)
"""


def make(name: str, /, **changes: Any) -> Any:
    """Build a ready-made model by its name: a model with `init`, `loss` and `evaluate`.

    Args:
      name: a key of `js.models.SIZES`, such as "llama3-8b".
      **changes: arguments of the model's function (`js.models.gpt`, `llama` or `moe`), which replace the ready-made
        arguments.

    Returns:
      The model, without arrays: a `js.Stacked` that every engine can run, with the `remat` of the size as the default
      for engines.

    Raises:
      ValueError: no such size, a change that is no argument of the model's function (the message lists the arguments
        that exist), or a value that the function refuses.

    Example:
        model = js.models.make("llama3-8b", seq=131_072, rope_scaling=8)
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
        step = js.make_step(model.loss, tx, layout, engine=js.explicit(precision="bf16"))
    """
    if name not in SIZES:
        raise ValueError(f"js.models.make: there is no size {name!r}; use one of {', '.join(SIZES)}")
    return SIZES[name].model(**changes)
