"""Load and save models in Hugging Face's format, as `js.hf`.

    model = js.hf.model("folder")
    layout = js.layout(js.fsdp(), mesh, model.init, tx)
    run = js.init(model.init, tx, layout, 0, init_from=js.hf.load("folder", layout))
    js.hf.save("other", run, layout)

    families.py     a table for each family of models: the names of its tensors, and of its sizes in config.json
    config.py       convert config.json to the arguments of js.models, and back
    entries.py      the entries of config.json that are converted together, such as those of rotary positions
    text_part.py    take the language model out of a model that also reads images
    folder.py       find a folder with config.json and safetensors
    hub.py          find a model of the Hugging Face hub, in its cache or by downloading it
    places.py       map jaxshard's arrays to tensors in the files: names, transposes and reshapes
    load.py         js.hf.model and js.hf.load
    save.py         js.hf.save

Imports `core/`, `models/`, `data/`, `distributed/`, `storage/` and `checkpoint/`; needs neither transformers nor torch.
"""

from jaxshard.hf.load import load as load
from jaxshard.hf.load import model as model
from jaxshard.hf.save import save as save
