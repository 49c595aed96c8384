"""Loading a checkpoint in Hugging Face's form: bytes read and host memory of every process.

    python benchmarks/hf_load.py [--layers 9] [--folder DIR]

Writes a Llama of 4.1 GB with random weights into a temporary folder, in shards of 500 MB, and loads it onto 8 simulated
devices under js.fsdp() in 1, 2 and 4 processes. Each process prints

    read     bytes that it read from files, as the kernel counts them (rchar in /proc/self/io)
    peak     the most memory that it had while loading beyond that before, as the kernel counts it (VmHWM, reset before)
    shards   bytes of the arrays on its devices
    slice    bytes of the largest part that one device has of an array

On simulated devices the shards are in the host's memory themselves, so the peak is to be compared with shards + 10 % +
slice. It needs Linux.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 6144,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
SHARD = 500_000_000


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the model."""
    C, F = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    K = C // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], C),
        "model.norm.weight": (C,),
    }
    for i in range(CONFIG["num_hidden_layers"]):
        layer = {"self_attn.q_proj": (C, C), "self_attn.k_proj": (K, C), "self_attn.v_proj": (K, C)}
        layer |= {"self_attn.o_proj": (C, C), "mlp.gate_proj": (F, C), "mlp.up_proj": (F, C), "mlp.down_proj": (C, F)}
        layer |= {"input_layernorm": (C,), "post_attention_layernorm": (C,)}
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"lm_head.weight": (CONFIG["vocab_size"], C)}


def write(folder: Path) -> int:
    """Write the checkpoint, tensor by tensor; returns its bytes."""
    import math

    import numpy as np

    (folder / "config.json").write_text(json.dumps(CONFIG))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes().items():
        if sum(4 * math.prod(one) for one in shards[-1].values()) + 4 * math.prod(shape) > SHARD and shards[-1]:
            shards.append({})
        shards[-1][name] = shape
    weights = {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for name, shape in shard.items():
            size = 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
            weights[name], at = file.name, at + size
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for name, shape in shard.items():
                draw = np.random.default_rng(zlib.crc32(name.encode()))
                opened.write(draw.standard_normal(shape, np.float32))
    index = {"metadata": {}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(4 * math.prod(shape) for shape in shapes().values())


def load(folder: str, address: str, index: int, count: int) -> None:
    """Load the checkpoint in one of several processes, and print what it took."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8 // count)
    if count > 1:
        jax.distributed.initialize(address, count, index)
    import optax

    import jaxshard as js

    model, mesh = js.hf.model(folder), js.make_mesh(data=8)
    layout = js.layout(js.fsdp(), mesh, model.init, optax.sgd(1.0))
    jax.block_until_ready(jax.device_put(0.0, jax.local_devices()[0]))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before, read = kernel_number("status", "VmRSS"), kernel_number("io", "rchar")
    params = jax.block_until_ready(js.hf.load(folder, layout))
    peak, read = 1024 * (kernel_number("status", "VmHWM") - before), kernel_number("io", "rchar") - read
    parts = [part.data.nbytes for x in jax.tree.leaves(params) for part in x.addressable_shards]
    print(
        json.dumps({"process": index, "read": read, "peak": peak, "shards": sum(parts), "slice": max(parts)}),
        flush=True,
    )


def kernel_number(file: str, name: str) -> int:
    """A number that the kernel keeps of this process."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Write the checkpoint, and load it in 1, 2 and 4 processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", nargs=4, metavar=("FOLDER", "ADDRESS", "INDEX", "COUNT"))
    parser.add_argument("--layers", type=int, default=18, help="of the model: 9 make 2.3 GB, 18 make 4.1 GB")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    args = parser.parse_args()
    if args.load:
        folder, address, index, count = args.load
        return load(folder, address, int(index), int(count))
    CONFIG["num_hidden_layers"] = args.layers
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(f"checkpoint: {write(Path(folder)) / 1e9:.3f} GB", flush=True)
        print("processes  process   read MB   peak MB  shards MB  slice MB  peak less (1.1 shards + slice) MB")
        for count in (1, 2, 4):
            with socket.socket() as free:
                free.bind(("localhost", 0))
                address = f"localhost:{free.getsockname()[1]}"
            command = [sys.executable, __file__, "--load", folder, address]
            started = [
                subprocess.Popen([*command, str(i), str(count)], stdout=subprocess.PIPE, text=True)
                for i in range(count)
            ]
            for process in started:
                out = process.communicate()[0].splitlines()
                if process.returncode:
                    raise SystemExit(f"a process failed with {process.returncode}")
                one = json.loads(next(line for line in out if line.startswith("{")))
                read, peak, shards, part = (one[name] / 1e6 for name in ("read", "peak", "shards", "slice"))
                over = peak - 1.1 * shards - part
                print(f"{count:9d}  {one['process']:7d} {read:9.1f} {peak:9.1f} {shards:10.1f} {part:9.1f}  {over:.1f}")


if __name__ == "__main__":
    main()
