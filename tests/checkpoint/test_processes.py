"""Two processes save into one folder and one restores, and the other way round."""

import pytest

import jaxshard as js
from jaxshard.checkpoint.checksums import find_damage
from jaxshard.checkpoint.reader import describe
from tests.checkpoint.runs import assert_same, made
from tests.distributed.launched import printed_together

PROGRAM = """
    import sys
    import jax
    address, index, count, root, which, action = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.distributed.initialize(address, int(count), int(index))
    import threading
    import numpy as np
    from jax.experimental import multihost_utils
    import jaxshard as js
    from jaxshard.training.state import run_key

    def in_the_main_thread(collective):
        def call(*args, **kwargs):
            assert threading.current_thread() is threading.main_thread(), "beside those of training"
            return collective(*args, **kwargs)
        return call

    for name in ("sync_global_devices", "broadcast_one_to_all", "process_allgather"):
        setattr(multihost_utils, name, in_the_main_thread(getattr(multihost_utils, name)))
    from tests.checkpoint.runs import made
    mine = made(which)
    if action == "save":
        run = mine.run()
        later = run._replace(step=run.step + 1)
        with js.Checkpointer(root, mine.layout, every=1, keep=1) as checkpointer:
            checkpointer(3, run)
            checkpointer(4, later)
        js.save(root, later, mine.layout)
        try:
            js.save(root, later._replace(key=run_key(later.key)), mine.layout)
        except (ValueError, OSError) as error:
            print("refused", error)
    else:
        run, saved = js.restore(root, mine.layout), mine.run()
        assert int(run.step) == (3 if action == "restore" else 4)
        for x, y in zip(jax.tree.leaves(run._replace(step=saved.step)), jax.tree.leaves(saved), strict=True):
            for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
                if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
                    assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        print("restored")
"""


def in_processes(count, action, root, name="three"):
    """What each of them printed."""
    return printed_together(PROGRAM, str(root), name, action, count=count)


def bytes_below(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three", "ddp"])
def test_two_processes_save_and_one_restores(name, tmp_path):
    outputs = in_processes(2, "save", tmp_path, name)
    assert all("refused" in output and "step 4 of another run is there" in output for output in outputs)
    assert [path.name for path in tmp_path.iterdir()] == ["4"] and find_damage(tmp_path / "4") == []
    assert describe(tmp_path).made["processes"] == 2
    written = [bytes_below(tmp_path / "4" / "arrays" / "state" / f"ocdbt.process_{index}") for index in range(2)]
    assert min(written) > sum(written) / 4, "both write, also what lies in both"
    back, expected = js.restore(tmp_path, made("zero1").layout), made("zero1").run()
    assert_same(back, expected._replace(step=expected.step + 1))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_one_process_saves_and_several_restore(count, tmp_path):
    js.save(tmp_path, made("pipeline").run(), made("pipeline").layout)
    assert all(output.endswith("restored\n") for output in in_processes(count, "restore", tmp_path))


@pytest.mark.slow
def test_two_processes_save_and_four_restore(tmp_path):
    in_processes(2, "save", tmp_path)
    assert all(output.endswith("restored\n") for output in in_processes(4, "restore later", tmp_path))
