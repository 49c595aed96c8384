"""Audits of training steps that others publish: MaxText, Flax's example lm1b and EasyDeL, none of them changed.

    python benchmarks/others.py maxtext --python MAXTEXT/bin/python [--dump FOLDER] [--json FILE]
    python benchmarks/others.py lm1b lm1b-rows --python FLAX/bin/python --source FLAX_CHECKOUT
    python benchmarks/others.py easydel --python EASYDEL/bin/python

Each program is compiled by its own code, in a process and an environment of its own; XLA writes the compiled step to a
dump, and the dump is audited as `jaxshard audit --hlo` does. MaxText compiles for TPUs that are not here (rows of
`maxtext.py`), the others for eight simulated CPU devices. In place of their data they get tokens made here.

    MAXTEXT    Python 3.12: pip install "maxtext[tpu]==0.2.5" -e .
    FLAX       pip install flax optax clu ml_collections tensorflow tensorboard tensorflow-datasets tensorflow-text;
               FLAX_CHECKOUT is github.com/google/flax
    EASYDEL    pip install easydel==0.3.0 torch pillow

`docs/records/audits.md` says what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DEVICES = 8
ROWS_PER_DEVICE = 2


class Program(NamedTuple):
    """A public program.

    Attributes:
      axes: of its mesh, those of several devices, by what they are for.
      strategy: that it is meant to have.
      row: of `maxtext.py`; "" for others.
    """

    axes: dict[str, int]
    strategy: str
    row: str = ""


PROGRAMS = {
    "maxtext": Program({"fsdp": 256}, "fsdp", "llama2-7b"),
    "maxtext-tensor": Program({"fsdp": 64, "tensor": 8}, "fsdp", "llama3-70b-tensor"),
    "maxtext-experts": Program({"fsdp": 32, "expert": 8}, "fsdp", "mixtral-8x7b-v5e-expert"),
    "lm1b": Program({"fsdp": DEVICES}, "fsdp"),
    "lm1b-rows": Program({"fsdp": DEVICES}, "fsdp"),
    "easydel": Program({"fsdp": DEVICES}, "fsdp"),
}
"""By name. lm1b has its default configuration, lm1b-rows the same with its rows split over the axis fsdp too."""


class Compiled(Exception):
    """The step is compiled, which is all that is wanted."""


def lm1b(name: str, source: Path, work: Path) -> None:
    """Run Flax's example until its first step, with tokens of ones in place of the corpus."""
    import numpy as np

    sys.path.insert(0, str(source / "examples" / "lm1b"))
    pipeline: Any = types.ModuleType("input_pipeline")

    class Encoder:
        def vocab_size(self) -> int:
            return 30_000

        def tokenize(self, text: str) -> Any:
            return types.SimpleNamespace(numpy=lambda: np.array([5, 6, 7, 2], np.int32))

    def get_datasets(*, n_devices: int, config: Any, vocab_path: str) -> Any:
        def batches() -> Iterator[Any]:
            yield {"inputs": np.ones((config.per_device_batch_size * n_devices, config.max_target_length), np.int32)}
            raise Compiled

        return batches(), None, None, Encoder()

    pipeline.get_datasets = get_datasets
    sys.modules["input_pipeline"] = pipeline
    import train
    from configs import default

    config = default.get_config()
    config.update({"save_checkpoints": False, "restore_checkpoints": False, "per_device_batch_size": ROWS_PER_DEVICE})
    if name == "lm1b-rows":
        config.data_sharding = ["data", "fsdp"]
    train.train_and_evaluate(config, str(work))


def easydel(work: Path) -> None:
    """Train a small Llama for one step with EasyDeL's trainer."""
    import easydel as ed
    import jax.numpy as jnp
    import numpy as np
    from datasets import Dataset
    from flax import nnx

    rows, seq = ROWS_PER_DEVICE * DEVICES, 256
    config = ed.LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        sharding_axis_dims=(1, DEVICES, 1, 1, 1),  # dp, fsdp, ep, tp, sp
        attn_mechanism="vanilla",
    )
    model = ed.LlamaForCausalLM(config=config, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    names = ("input_ids", "attention_mask", "labels")
    data = Dataset.from_dict({name: np.ones((4 * rows, seq), np.int32) for name in names})
    arguments = ed.TrainingArguments(
        save_directory=str(work),
        num_train_epochs=1,
        total_batch_size=rows,
        max_training_steps=1,
        max_length=seq,
        use_wandb=False,
        do_last_save=False,
        do_eval=False,
        learning_rate=1e-4,
    )
    ed.Trainer(arguments=arguments, model=model.shard_model(), dataset_train=data).train()


def child(name: str, source: Path | None, out: Path) -> None:
    """Compile a program in this process, in its own environment."""
    flags = f"--xla_force_host_platform_device_count={DEVICES} --xla_dump_to={out}"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    work = Path(tempfile.mkdtemp(prefix="others-"))
    try:
        if name.startswith("lm1b"):
            assert source is not None, "--source: a checkout of github.com/google/flax"
            lm1b(name, source, work)
        else:
            easydel(work)
    except Compiled:
        pass


def compile_program(name: str, args: argparse.Namespace, out: Path) -> None:
    """Compile a program in a process of its own; returns when its text is in the folder."""
    from compiler_dump import is_assigned

    here, row = Path(__file__).resolve(), PROGRAMS[name].row
    if row:
        command = [args.python, str(here.with_name("maxtext.py")), "--child", row, "maxtext", str(out)]
    else:
        command = [args.python, str(here), name, "--child", str(out)]
        command += ["--source", args.source] if args.source else []
    with open(out / "log.txt", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(1)
            if row and is_assigned(out):  # what follows is the generation of code
                time.sleep(3)
                process.kill()
    if step_text(out) is None:
        raise SystemExit(
            f"{name}: no compiled step in {out}; its log ends with\n{(out / 'log.txt').read_text()[-2000:]}"
        )


def step_text(out: Path) -> Path | None:
    """The text of the training step in a dump: the largest program of such a name."""
    found = [file for file in out.glob("*after_optimizations.txt") if re.search(r"train(ing)?_step", file.name)]
    return max(found, key=lambda file: file.stat().st_size, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--python", default=sys.executable, help="of the environment that has the program")
    parser.add_argument("--source", help="a checkout of github.com/google/flax, for lm1b")
    parser.add_argument("--dump", type=Path, help="a folder for the dumps; one that is there already is only read")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.programs[0], Path(args.source) if args.source else None, args.child)
        return
    from jaxshard.checks.programs.report import audit_program

    results = []
    for name in args.programs:
        out = Path(args.dump or tempfile.mkdtemp(prefix="others-")) / name
        out.mkdir(parents=True, exist_ok=True)
        if step_text(out) is None:
            compile_program(name, args, out)
        file = step_text(out)
        assert file is not None
        found = audit_program(file.read_bytes(), PROGRAMS[name].axes, strategy=PROGRAMS[name].strategy)
        print(f"== {name} ({file})\n\n{found}\n", flush=True)
        results.append({"program": name} | found.as_dict())
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
