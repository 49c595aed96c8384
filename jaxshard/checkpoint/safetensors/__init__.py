"""Save and load models as safetensors files, which other programs read: in model order, without padding.

    js.save_safetensors("model.safetensors", run, layout)
    run = js.init(init_fn, tx, layout, key, init_from=js.load_safetensors("model.safetensors", layout))

The name of a tensor is its path in the tree that `init_fn` returns, joined by dots. Each file is written by one
process, piece by piece in the order of its bytes; the file appears when it is complete, and has a checksum per tensor.

names.py lists the tensors of a model, header.py encodes and decodes the header of a file, pieces.py copies a sharded
array to the host in pieces of 16 MiB, parts.py reads a part of a tensor, index.py finds the files of a model.
reader.py and writer.py have the public functions for models, run.py those for a TrainState. The format is read and
written here, not by the `safetensors` package; docs/records/decisions.md says why.
"""
