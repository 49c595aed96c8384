"""Load and save models in Hugging Face's format, as `js.hf`.

    model = js.hf.model("folder")
    layout = js.layout(js.fsdp(), mesh, model.init, tx)
    run = js.init(model.init, tx, layout, 0, init_from=js.hf.load("folder", layout))
    js.hf.save("other", run, layout)

    families.py     a table for each family: the names of its tensors and sizes
    config.py       convert config.json to the arguments of js.models, and back
    folder.py       find a folder with config.json and safetensors, also in the hub's cache
    places.py       map our arrays to tensors in the files: names, transposes and reshapes
    load.py, save.py

Imports `core/`, `models/`, `data/`, `distributed/` and `checkpoint/`; needs neither transformers nor torch.
"""

from jaxshard.hf.load import load as load
from jaxshard.hf.load import model as model
from jaxshard.hf.save import save as save
