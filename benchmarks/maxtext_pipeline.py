"""Compiles MaxText's own pipelined training step for TPUs that are not here, and prints what it takes as JSON.

`pipeline.py --maxtext` runs this, one process per number of micro-batches: MaxText configures the whole process. It
needs Python 3.12 and `pip install "maxtext[tpu]"`. MaxText's defaults are kept (bf16 products, f32 weights and moments,
its remat policy) but for what jaxshard's side has not: clipping, packed rows, checkpoints.

    python benchmarks/maxtext_pipeline.py v5e-4 '{"width": 1024, ...}' 8
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def options(topology: str, shape: dict[str, Any], microbatches: int) -> dict[str, Any]:
    """MaxText's settings for a Llama of this shape, one micro-batch of `rows` rows at a time."""
    stages, chunks = shape["stages"], shape["chunks"]
    return {
        "compile_topology": topology,
        "compile_topology_num_slices": 1,
        "ici_pipeline_parallelism": stages,
        "ici_data_parallelism": shape["data"],
        "ici_fsdp_parallelism": 1,
        "num_layers_per_pipeline_stage": shape["blocks"] // (stages * chunks),
        "num_pipeline_microbatches": microbatches,
        "per_device_batch_size": microbatches * shape["rows"] // (stages * shape["data"]),
        "decoder_block": "llama2",
        "vocab_size": shape["vocab"],
        "base_emb_dim": shape["width"],
        "base_num_decoder_layers": shape["blocks"],
        "base_num_query_heads": shape["heads"],
        "base_num_kv_heads": shape["kv_heads"],
        "head_dim": shape["width"] // shape["heads"],
        "base_mlp_dim": shape["hidden"],
        "max_target_length": shape["seq"],
        "attention": "dot_product",
        "scan_layers": False,
        "gradient_clipping_threshold": 0,
        "packing": False,
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "log_config": False,
        "run_name": "pipeline",
        "base_output_directory": "/tmp/maxtext_pipeline",
    }


def main(topology: str, shape: str, microbatches: str) -> None:
    import maxtext
    from maxtext.trainers.pre_train import train_compile

    found: dict[str, Any] = {}
    compile_step = train_compile.jit_and_compile

    def measured(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        compiled = compile_step(*args, **kwargs)
        memory = compiled.memory_analysis()
        found.update(
            temporaries=memory.temp_size_in_bytes,
            arguments=memory.argument_size_in_bytes,
            peak=memory.peak_memory_in_bytes,
            cpu_seconds=time.process_time() - started,
        )
        return compiled

    train_compile.jit_and_compile = measured
    config = Path(maxtext.__file__).parent / "configs" / "base.yml"
    settings = options(topology, json.loads(shape), int(microbatches))
    train_compile.main(["train_compile", str(config), *(f"{name}={value}" for name, value in settings.items())])
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
