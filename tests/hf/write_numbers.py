"""Write tests/hf/numbers.json: what transformers computes for every case.

    python -m tests.hf.write_numbers

It needs torch and transformers (extra `hf-test`).
"""

import json
import tempfile
from pathlib import Path

from tests.hf.checkpoints import CASES, NUMBERS, SEEN, SHOWN, tokens
from tests.hf.transformers_models import logits, write


def compute(case: str) -> dict:
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write(case, folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        config = json.loads((folder / "config.json").read_text())
    found = logits(model, tokens())
    return {
        "config": config,
        "tensors": shapes,
        "logits": [[[round(float(x), 5) for x in row[at, :SHOWN]] for at in SEEN] for row in found],
        "best": found.argmax(-1).tolist(),
    }


if __name__ == "__main__":
    made = {case: compute(case) for case in CASES}
    lines = [f'"{case}": {json.dumps(one, separators=(",", ":"))}' for case, one in made.items()]
    NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
