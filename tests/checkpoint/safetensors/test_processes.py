"""Two processes write the files of one model between them, fail together, and load it."""

import errno
import os

import jax
import numpy as np
import pytest
import safetensors.numpy

import jaxshard as js
from jaxshard.storage.paths import as_path
from tests.checkpoint.runs import made
from tests.checkpoint.safetensors.test_safetensors import assert_equal, by_name, expected
from tests.distributed.launched import printed_together

PROGRAM = """
    import sys
    import jax
    address, index, _, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(address, 2, int(index))
    import hashlib
    import numpy as np
    import jaxshard as js
    from jaxshard.checkpoint.safetensors import writer
    from tests.checkpoint.runs import made
    mine = made("three")
    run = mine.run()
    write, there = writer._write_draft, []
    def full(draft, *rest):
        there.append(draft.name)
        if index == "1":
            write(draft, *rest)
            raise OSError(28, "No space left on device")
        write(draft, *rest)
    writer._write_draft = full
    try:
        js.save_safetensors(folder + "/full.safetensors", run, mine.layout, max_bytes=20_000)
    except OSError as error:
        print("refused", error)
    writer._write_draft = write
    print("wrote", *there)
    js.save_safetensors(folder + "/many.safetensors", run, mine.layout, max_bytes=20_000)
    js.save_safetensors(folder + "/one.safetensors", run, mine.layout)
    print("bytes", hashlib.sha256(js.to_bytes(run, mine.layout)).hexdigest())
    back, position = js.run_from_bytes(js.run_to_bytes(run, mine.layout, data=[3]), mine.layout)
    assert position == [3]
    for x, y in zip(jax.tree.leaves(back._replace(key=0)), jax.tree.leaves(run._replace(key=0)), strict=True):
        for a, b in zip(getattr(x, "addressable_shards", ()), getattr(y, "addressable_shards", ()), strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    for name in ("many", "one", "theirs"):
        model = js.load_safetensors(folder + f"/{name}.safetensors", mine.layout)
        again = js.init(mine.toy.init_fn, TX, mine.layout, 0, init_from=model) if name == "one" else run
        for x, y in zip(jax.tree.leaves(again.params), jax.tree.leaves(run.params), strict=True):
            for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
                assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    try:
        js.load_safetensors(folder + "/bad.safetensors", mine.layout)
    except ValueError as error:
        print("damaged", error)
    try:
        js.save_safetensors(folder + "/one.safetensors", run, mine.layout)
    except OSError as error:
        print("there", type(error).__name__)
"""


def in_two_processes(folder):
    """What each of them printed, by its first words."""
    program = PROGRAM.replace("import made\n", "import TX, made\n")
    outputs = printed_together(program, str(folder), count=2)
    return [dict(line.split(" ", 1) for line in output.splitlines() if " " in line) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tmp_path", "bucket"])
def test_two_processes(place, request):
    folder = as_path(request.getfixturevalue(place))
    (folder / "theirs.safetensors").write_bytes(safetensors.numpy.save(expected()))
    layout = made("three").layout
    raw = js.to_bytes(made("three").run(), layout)
    (folder / "bad.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    first, second = in_two_processes(folder)
    assert first["bytes"] == second["bytes"]
    drafts = [f"full-{i:05d}-of-00005.safetensors.draft" for i in range(1, 6)]
    assert (first["wrote"].split(), second["wrote"].split()) == (drafts[::2], drafts[1::2])
    assert os.strerror(errno.ENOSPC) in second["refused"] and "process 1 says why" in first["refused"]
    assert (first["there"], second["there"]) == ("FileExistsError", "OSError")
    assert "is damaged" in first["damaged"] and "is damaged" in second["damaged"]
    many = [f"many-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    names = ["bad.safetensors", *many, "many.safetensors.index.json", "one.safetensors", "theirs.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert (folder / "one.safetensors").read_bytes() == raw
    tensors = [safetensors.numpy.load((folder / name).read_bytes()) for name in many]
    assert_equal({key: x for file in tensors for key, x in file.items()}, expected())
    for x, want in zip(jax.tree.leaves(js.load_safetensors(folder / "many.safetensors", layout)), expected().values()):
        assert np.asarray(x).tobytes() == want.tobytes()
    assert list(by_name(js.load_safetensors(folder / "one.safetensors", layout))) == list(expected())
