"""Tokens from a model beside transformers' `generate`: the same weights, prompts and greedy tokens, on CPU cores.

    python benchmarks/generate.py --rounds 3 --json FILE

Prints CPU-seconds for each token of each side in paired rounds, a token of all rows being one step, prompts and
compilation left out; and FLOPs and bytes of the compiled step for several sizes of the cache, beside what the model
needs: two operations for each parameter and row, and each parameter and all of the cache read once. Needs torch and
transformers (extra `hf-test`).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

import jaxshard as js
from jaxshard.generation.generate import check_request
from jaxshard.generation.programs import Draw
from jaxshard.generation.sampling import Sampling

SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        theirs = write(Path(name))
        model = js.hf.model(name, dtype="float32")
        layout = js.layout(js.ddp(), js.make_mesh(jax.devices()[:1], data=1), model.init)
        params = js.init(model.init, None, layout, 0, init_from=js.hf.load(name, layout)).params
    rows = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (args.rows, args.prompt))

    def ours(length: int) -> list[list[int]]:
        return js.generate(model, params, layout, rows, length=length)

    def transformers(length: int) -> list[list[int]]:
        import torch

        with torch.no_grad():
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            made = theirs.generate(torch.from_numpy(rows), max_new_tokens=length, min_new_tokens=length, **options)
        return made.tolist()

    same = ours(args.length) == transformers(args.length)
    print(f"{args.rows} rows, prompts of {args.prompt}, {args.length} new tokens; the same tokens: {same}")
    rounds = {"js.generate": [], "transformers": []}
    for _ in range(args.rounds):
        for side, run in (("js.generate", ours), ("transformers", transformers)):
            run(1)
            short, long = spent(run, 1), spent(run, args.length)
            rounds[side].append([(b - a) / (args.length - 1) for a, b in zip(short, long)])
    for side, found in rounds.items():
        cpu, wall = np.median(np.array(found), axis=0) * 1000
        print(f"  {side:12}  {cpu:7.2f} CPU-ms and {wall:7.2f} ms a token, medians of {args.rounds} rounds")
    result = {"same": same, "seconds": rounds, "step": [cost(model, params, layout, args.rows, s) for s in (128, 1024)]}
    for one in result["step"]:
        print("  cache of {slots} slots: {flops:.3e} FLOPs (model {model_flops:.3e}), {bytes:.3e} bytes".format(**one))
        print("    (parameters and cache once {model_bytes:.3e}); temporaries {temporaries:.3e} bytes".format(**one))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


def write(folder: Path):
    """Let transformers draw the weights of a Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.1)).float().eval()
    model.save_pretrained(folder)
    return model


def spent(run, length: int) -> tuple[float, float]:
    """Seconds of all cores, and of the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    run(length)
    return time.process_time() - cpu, time.perf_counter() - wall


def cost(model, params, layout, rows: int, slots: int) -> dict[str, float]:
    """FLOPs and bytes of a step, those of the blocks' loop counted for every block, and what the model needs."""
    _, programs = check_request(model, layout, [[0]], 1)
    weights, zeros = programs.weights(params), np.zeros(rows, np.int32)
    given = Draw(jax.random.key(0), zeros.astype(np.uint32), np.zeros(0, np.int32), Sampling().arrays(1))
    state, _ = programs.prefill(weights, np.zeros((rows, 16), np.int32), zeros + 3, given, size=slots)
    lowered = programs.decode.lower(weights, state, given)
    compiled = lowered.compile()
    found, memory = compiled.cost_analysis(), compiled.memory_analysis()
    depth = model.num_blocks
    matrices = sum(x.size for x in jax.tree.leaves(params)) - SIZES["vocab_size"] * SIZES["hidden_size"]  # of a look-up
    cache = sum(x.size for x in jax.tree.leaves(state.caches))
    per_slot = 4 * rows * SIZES["hidden_size"] * depth
    jaxpr = jax.make_jaxpr(programs.decode)(weights, state, given)
    return {
        "slots": slots,
        "flops": dots(jaxpr.jaxpr),
        "model_flops": 2 * rows * matrices + per_slot * slots,
        "bytes": found["bytes accessed"],
        "model_bytes": 4 * (matrices + cache),
        "temporaries": memory.temp_size_in_bytes,
    }


def dots(jaxpr, times: int = 1) -> float:
    """FLOPs of all products of a program, those of loops for every turn."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * times * np.prod(eqn.outvars[0].aval.shape) * np.prod([left[dim] for dim in contracted])
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += sum(dots(getattr(inner, "jaxpr", inner), times * turns) for inner in jaxprs_in_params(eqn.params))
    return total


if __name__ == "__main__":
    main()
