"""Models as safetensors, for other programs: model order, no padding, whatever layout trained them.

    js.save_safetensors("model.safetensors", run, layout)
    run = js.init(init_fn, tx, layout, key, init_from=js.load_safetensors("model.safetensors", layout))

A tensor is named by its path in what `init_fn` returns, joined by dots. A file is written by one process, in pieces and
in the order of its bytes; it appears when it is complete, and carries a checksum per tensor.
"""
