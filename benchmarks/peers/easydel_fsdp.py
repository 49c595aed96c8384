"""Two devices by EasyDeL: its trainer, and its GPT-NeoX, a GPT that turns heads where ours adds positions.

In 0.3.0 its GPT-2 does not run (the bias of three projections has the shape of one), and its OPT ignores `ffn_dim`.
"""

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset
from flax import nnx
from in_turns import InTurns
from shape import LEARNING_RATE, WEIGHT_DECAY

STEPS = 1000


def build(shape, rank, meeting):
    config = ed.GPTNeoXConfig(
        vocab_size=shape.vocab,
        max_position_embeddings=shape.seq + 1,
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        hidden_act="gelu_new",
        use_parallel_residual=False,
        sharding_axis_dims=(1, 2, 1, 1, 1),  # dp, fsdp, ep, tp, sp
        attn_mechanism="vanilla",
    )
    model = ed.GPTNeoXForCausalLM(config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    tokens = np.tile(shape.tokens(), (STEPS, 1))
    data = Dataset.from_dict({"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": tokens})
    arguments = ed.TrainingArguments(
        save_directory=meeting,
        num_train_epochs=1,
        total_batch_size=shape.batch,
        max_training_steps=STEPS,
        max_length=shape.seq + 1,
        optimizer="adamw",
        scheduler="none",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        use_wandb=False,
        do_last_save=False,
        do_eval=False,
        shuffle_train_dataset=False,
    )

    def train(hook):
        class Trainer(ed.Trainer):
            def on_step_end(self, state, metrics, step):
                hook(metrics.loss)
                return state, metrics

        Trainer(arguments=arguments, model=model.shard_model(), dataset_train=data).train()

    return InTurns(train).step, sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
