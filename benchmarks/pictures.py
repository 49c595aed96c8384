"""The pictures of the guide: memory by role, a schedule, and the sharding of arrays, light and dark.

    python benchmarks/pictures.py [--folder docs/pictures]

Nothing runs: llama3-8b on 256 chips of TPU v5e is predicted, and gpt-1m laid out on eight of them. `curves.py` draws
the loss curves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import matplotlib.style
import optax

import jaxshard as js
from jaxshard.plan.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
LOOKS = {"light": "default", "dark": "dark_background"}
TX = optax.adamw(1e-3)


def predicted() -> dict[str, Prediction]:
    """Predict a step of llama3-8b, 256 rows of 8,192 tokens in bf16, on 256 chips under three strategies."""
    model = js.models.make("llama3-8b", seq=8192)
    batch = {"tokens": jax.ShapeDtypeStruct((256, 8193), jnp.int32)}
    engine = js.explicit(precision="bf16", remat="nothing")
    ways: dict[str, tuple[Any, dict[str, int]]] = {
        "zero1": (js.zero1("data"), {"data": 256}),
        "fsdp": (js.fsdp("data"), {"data": 256}),
        "fsdp + tensor": (js.compose(js.fsdp("data"), js.tensor()), {"data": 64, "tensor": 4}),
    }
    found = {}
    for name, (strategy, axes) in ways.items():
        layout = js.layout(strategy, js.plan.planned_mesh("v5e:16x16", **axes), model.init, TX)
        found[name] = js.plan.predict(layout, model.loss, batch, engine, tx=TX, estimate=True)
    return found


def figures() -> dict[str, Callable[[], Figure]]:
    """Return what draws each picture, by the names of their files."""
    predictions = predicted()
    gpt, mesh = js.models.make("gpt-1m"), js.plan.planned_mesh("v5e:2x4", data=4, tensor=2)
    layout = js.layout(js.compose(js.zero2("data"), js.tensor()), mesh, gpt.init, TX)
    title = "llama3-8b, 8,192 tokens on each of 256 TPU v5e"
    return {
        "memory": lambda: js.plan.memory_figure(predictions, title=title),
        "schedule": lambda: js.schedules.schedule_figure(js.schedules.zero_bubble(4, 8, chunks=1)),
        "sharding": lambda: js.plan.sharding_figure(layout, leaves=5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=PICTURES)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in figures().items():
        for look, style in LOOKS.items():
            with matplotlib.style.context(style):
                js.plan.write_picture(draw(), folder / f"{name}_{look}.svg")
        print(f"{name}: light and dark in {folder}")


if __name__ == "__main__":
    main()
