"""Models and weights in the form of Hugging Face, in and out, as `js.hf`.

    model = js.hf.model("folder")
    layout = js.layout(js.fsdp(), mesh, model.init, tx)
    run = js.init(model.init, tx, layout, 0, init_from=js.hf.load("folder", layout))
    js.hf.save("other", run, layout)

    families.py     the tables: of each family the names of its tensors and of its sizes
    config.py       config.json to the arguments of js.models, and back
    folder.py       a folder with config.json and safetensors, or the hub's cache of one
    places.py       where each of our arrays lies in theirs: names, transposes and reshapes
    load.py, save.py

Imports `core/`, `models/`, `data/`, `distributed/` and `checkpoint/`; needs neither transformers nor torch.
"""

from jaxshard.hf.load import load as load
from jaxshard.hf.load import model as model
from jaxshard.hf.save import save as save
