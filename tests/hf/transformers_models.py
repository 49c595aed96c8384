"""The models of the cases in transformers, for what needs it: slow tests and tests/hf/write_numbers.py."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.hf.checkpoints import CASES, draw


def write(case: str, folder: Path) -> Any:
    """Let transformers write the folder of a case, draw the weights under the names in its file, and open it again."""
    from safetensors.numpy import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, entries = CASES[case]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **entries)).float().save_pretrained(folder)
    file = folder / "model.safetensors"
    drawn = {name: draw(name, x.shape) for name, x in load_file(file).items()}
    save_file(drawn, file, {"format": "pt"})
    return open_folder(folder)


def open_folder(folder: Path) -> Any:
    """Open a folder with transformers, as it is used without training."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto").eval()


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Compute all logits."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()
