"""Two devices by MaxText: its GPT-3 block with our sizes, its trainer, its synthetic rows."""

import os
from pathlib import Path

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # nothing of Google's cloud is looked for

import jax
import maxtext
from flax import nnx
from in_turns import InTurns
from maxtext.trainers.pre_train import train as trainer
from shape import LEARNING_RATE, WEIGHT_DECAY


def build(shape, rank, meeting):
    settings = {
        "hardware": "cpu",
        "run_name": "peer",
        "skip_jax_distributed_system": True,
        "base_output_directory": meeting,
        "decoder_block": "gpt3",
        "base_emb_dim": shape.width,
        "base_mlp_dim": 4 * shape.width,
        "base_num_decoder_layers": shape.blocks,
        "base_num_query_heads": shape.heads,
        "base_num_kv_heads": shape.heads,
        "head_dim": shape.width // shape.heads,
        "vocab_size": shape.vocab,
        "trainable_position_size": shape.seq,
        "max_target_length": shape.seq,
        "mlp_activations": ["gelu"],
        "fused_qkv": True,
        "attention": "dot_product",
        "dtype": "float32",
        "remat_policy": "minimal",
        "enable_dropout": False,
        "per_device_batch_size": shape.batch // 2,
        "dataset_type": "synthetic",
        "ici_fsdp_parallelism": 2,
        "opt_type": "adamw",
        "learning_rate": LEARNING_RATE,
        "adam_weight_decay": WEIGHT_DECAY,
        "gradient_clipping_threshold": 0,
        "steps": 1000,
        "enable_checkpointing": False,
        "jax_cache_dir": "",
    }
    sizes = []

    def train(hook):
        usual = trainer.training_loop_iteration

        def iteration(*parts):
            metrics = usual(*parts)
            sizes.append(sum(x.size for x in jax.tree.leaves(parts[0]["state"].filter(nnx.Param))))
            hook(metrics["scalar"]["learning/loss"])
            return metrics

        trainer.training_loop_iteration = iteration
        base = Path(maxtext.__file__).parent / "configs" / "base.yml"
        trainer.main(["train", str(base), *(f"{name}={value}" for name, value in settings.items())])

    return InTurns(train).step, lambda: sizes[0]
