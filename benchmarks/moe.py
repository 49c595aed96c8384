"""Products of rows with their experts' matrices: FLOPs of the compiled program over those that are needed.

    python benchmarks/moe.py                             # this machine's CPU
    python benchmarks/moe.py --topology v5e:2x2          # the TPU compiler, without a TPU (pip install "jax[tpu]")

8,192 rows [8192, 1024] times [E, 1024, 2048], evenly routed, forward and with the gradients of rows and matrices, by
`jax.lax.ragged_dot`, by what `js.moe` uses (blocks of rows on CPUs, megablox on TPUs) and, if it is installed, by
tokamax. 1.00 is 2 * 8192 * 1024 * 2048 forward, and three times that with gradients. A compiler counts the body of a
loop once, so blocks are counted as often as they run. What a kernel says of itself is taken at its word: tiles at the
borders of experts add up to E / 16 to it. "cycles" is the TPU compiler's estimate, which leaves kernels out: products
that it expands itself are in it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.compiler.topology import topology_mesh
from jaxshard.layers.moe.grouped import Dot
from jaxshard.layers.moe.products import Way, _block_size

ROWS, WIDTH, OUT = 8192, 1024, 2048
NEEDED = 2 * ROWS * WIDTH * OUT


def forms(platform: str) -> dict[str, Callable[..., jax.Array]]:
    """List the products to compare, each a function of (rows, matrices, sizes)."""
    found: dict[str, Callable[..., jax.Array]] = {
        "ragged_dot": jax.lax.ragged_dot,
        "js.moe": lambda x, w, sizes: Dot(ROWS, sizes, Way(platform, full=True))(x, w),
    }
    try:
        import tokamax  # type: ignore[import-not-found]
    except ImportError:
        return found
    if platform == "tpu":
        found["tokamax"] = lambda x, w, sizes: tokamax.ragged_dot(x, w, sizes, implementation="mosaic")
    return found


def measure(fn: Callable[..., Any], experts: int, mesh: Any, blocks: int) -> str:
    """Return what the compiled program computes, over what is needed."""
    dtype = jnp.float32 if mesh is None else jnp.bfloat16
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    shapes = [((ROWS, WIDTH), dtype), ((experts, WIDTH, OUT), dtype), ((experts,), jnp.int32)]
    args = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
    cells = []
    for call, needed in ((fn, NEEDED), (jax.grad(lambda *args: (fn(*args) ** 2).sum(), (0, 1)), 3 * NEEDED)):
        if mesh is not None:
            spec = PartitionSpec()
            call = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        compiled = jax.jit(call).lower(*args).compile()
        cycles = sum(map(int, re.findall(r'estimated_cycles":"(\d+)"', compiled.as_text())))
        flops = compiled.cost_analysis()["flops"] * blocks / needed
        cells.append(f"{flops:6.2f} {cycles:12,d} {compiled.memory_analysis().temp_size_in_bytes / 1e6:9.1f}")
    return "   ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", help="of TPUs, such as v5e:2x2")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    args = parser.parse_args()
    mesh = topology_mesh(args.topology, data=-1) if args.topology else None
    platform = "tpu" if mesh else "cpu"
    print(f"JAX {jax.__version__}, {args.topology or 'CPU'}")
    columns = f"{'FLOPs':>6} {'cycles':>12} {'temp MB':>9}"
    print(f"{'':18}{'forward':<32}with gradients\n{'experts':<8}{'form':10}{columns}   {columns}")
    for experts in args.experts:
        for name, fn in forms(platform).items():
            block = _block_size(ROWS, experts)
            in_blocks = name == "js.moe" and mesh is None
            blocks = experts * -(-(ROWS // experts) // block) if in_blocks else 1
            print(f"{experts:<8}{name:10}{measure(fn, experts, mesh, blocks)}", flush=True)


if __name__ == "__main__":
    main()
