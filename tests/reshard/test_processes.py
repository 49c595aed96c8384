"""Four processes move a run: between meshes over all of them, and from the first two of them to the last."""

import pytest

from tests.distributed.launched import printed_together

PROGRAM = """
    import sys
    import jax
    address, index, count, *names = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.distributed.initialize(address, int(count), int(index))
    import pytest
    import jaxshard as js
    from tests.reshard.cases import assert_holds, make_layout, run_of, stored_values, values_of
    from tests.reshard.recorder import Recorder

    source, target = (make_layout(name, int(first)) for name, first in (one.split("/") for one in names))
    values = values_of(source)
    here = bool(source.mesh.local_devices)
    run = run_of(source, values) if here else None
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        moved = js.transfer(run, source, target)
    assert_holds(moved, stored_values(target, values))
    plan = js.plan_transfer(source, target)
    for device, most in recorder.most.items():
        assert most <= plan.peak[device]
    params = js.transfer(run.params if here else source.shapes.params, source, target)
    assert_holds(params, stored_values(target, values).params)
    kinds = [call.name for call in recorder.calls]
    print("sent", recorder.bytes_sent() - plan.bytes, "cut", "cutter" in kinds, "inserted", "inserter" in kinds)
    if source.mesh.size == 8:
        try:
            js.transfer(run, source, make_layout("ddp", int(index)))
        except js.distributed.Disagreement as error:
            print("refused", "target: devices of the mesh" in str(error))
"""


@pytest.mark.slow
def test_four_processes_move_a_run_between_meshes_over_all_of_them():
    for output in printed_together(PROGRAM, "three/0", "tensor/4", count=4):
        assert "sent 0 cut True inserted" in output
        assert "refused True" in output


@pytest.mark.slow
def test_a_run_moves_from_two_processes_to_the_last_of_four():
    outputs = printed_together(PROGRAM, "fsdp/0", "zero2/6", count=4)
    assert all("sent 0 cut True inserted False" in output for output in outputs[:2])
    assert "sent 0 cut False inserted True" in outputs[3]
    assert "cut False inserted False" in outputs[2]
