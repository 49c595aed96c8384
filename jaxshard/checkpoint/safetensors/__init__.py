"""Models as safetensors files, for other programs: in model order, without padding, whatever layout trained them.

    js.save_safetensors("model.safetensors", run, layout)
    run = js.init(init_fn, tx, layout, key, init_from=js.load_safetensors("model.safetensors", layout))

A tensor is named by its path in what `init_fn` returns, joined by dots. One process writes a file, piece by piece in
the order of its bytes; the file appears when it is complete, and carries a checksum per tensor.

names.py lists the tensors of a model, header.py encodes and checks the beginning of a file, pieces.py takes an array
that is split over the mesh to the host in pieces of 16 MiB; reader.py and writer.py hold the public functions,
run.py those for a whole run. The format is read and written here and not by the `safetensors` package;
docs/records/decisions.md says why.
"""
