"""Models as safetensors files, for other programs: in model order, without padding, for any layout.

    js.save_safetensors("model.safetensors", run, layout)
    run = js.init(init_fn, tx, layout, key, init_from=js.load_safetensors("model.safetensors", layout))

A tensor is named by its path in the tree of `init_fn`, joined by dots. One process writes a file, piece by piece in
the order of its bytes; the file appears when it is complete, and carries a checksum per tensor.

names.py lists the tensors of a model, header.py encodes and checks the beginning of a file, pieces.py copies a sharded
array to the host in pieces of 16 MiB; reader.py and writer.py hold the public functions,
run.py the functions for a complete run. The format is read and written here, not by the `safetensors` package;
docs/records/decisions.md says why.
"""
