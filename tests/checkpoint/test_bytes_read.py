"""What `restore` reads, counted by TensorStore: along the axis that was saved, a process reads its part alone."""

import pytest

from tests.distributed.launched import printed_together

WHOLE = 2 * 2048 * 1024 * 4

PROGRAM = """
    import sys
    import jax
    address, index, count, root = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    if count != "1":
        jax.distributed.initialize(address, int(count), int(index))
    import jax.numpy as jnp, optax, tensorstore
    import jaxshard as js

    def init_fn(key):
        return {name: jax.random.normal(jax.random.fold_in(key, n), (2048, 1024)) for n, name in enumerate("ab")}

    def split(dim):
        def strategy(role, leaf, placement, mesh):
            dims = {0: (), 2: (dim,)}.get(len(leaf.shape), (0,)) if role != "batch" else (0,)
            return placement.split(dims[0], ("data",)) if dims else placement
        return strategy

    def read():
        metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in metrics for value in metric["values"])

    layouts = [js.layout(split(dim), js.make_mesh(data=8), init_fn, optax.sgd(1.0)) for dim in (0, 1)]
    js.save(root, js.init(init_fn, optax.sgd(1.0), layouts[0], 0), layouts[0])
    counts = [read()]
    for layout in layouts:
        js.restore(root, layout, verify=False)
        counts.append(read())
    print("read", counts[1] - counts[0], counts[2] - counts[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_process_reads_its_part(processes, tmp_path):
    """Along another axis each of its devices needs a part of everything, and reads no more than all of it."""
    outputs = printed_together(PROGRAM, str(tmp_path / "run"), count=processes)
    counts = [line.split()[1:] for output in outputs for line in output.splitlines() if line.startswith("read ")]
    assert len(counts) == processes
    for same, other in counts:
        assert WHOLE // processes <= int(same) < 1.01 * WHOLE / processes
        assert WHOLE <= int(other) < 1.01 * WHOLE * 8 / processes
