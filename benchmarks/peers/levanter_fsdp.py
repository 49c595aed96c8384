"""Two devices by Levanter: its trainer, and its GPT-2, whose head is its embedding."""

import haliax
import jax
import numpy as np
from levanter.distributed import RayConfig
from levanter.logging import WandbConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample
from levanter.trainer import OptimizerConfig, Trainer, TrainerConfig
from shape import LEARNING_RATE, WEIGHT_DECAY

STEPS = 1000


def build(shape, rank, meeting):
    config = TrainerConfig(
        train_batch_size=shape.batch,
        num_train_steps=STEPS,
        fsdp_axis="embed",
        require_accelerator=False,
        load_checkpoint=False,
        wandb=WandbConfig(mode="disabled"),
        ray=RayConfig(auto_start_cluster=False),
    )
    config.initialize({})
    gpt = Gpt2Config(
        seq_len=shape.seq,
        hidden_dim=shape.width,
        num_layers=shape.blocks,
        num_heads=shape.heads,
        gradient_checkpointing=False,
    )
    optimizer = OptimizerConfig(
        learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_grad_norm=None, lr_schedule="constant", warmup=0.0
    )

    def compute_loss(model, example, key=None):
        return model.compute_loss(example, key=key).scalar()

    trainer = Trainer(config, optimizer.build(STEPS), compute_loss)
    model_key, training_key = jax.random.split(jax.random.PRNGKey(0))
    axes = (config.TrainBatch, gpt.Pos)
    mask = np.ones((shape.batch, shape.seq), np.float32)
    mask[:, -1] = 0
    with trainer.device_mesh, haliax.axis_mapping(trainer.compute_axis_mapping):
        example = haliax.shard(LmExample(haliax.named(shape.tokens()[:, :-1], axes), haliax.named(mask, axes)))
        Vocab = haliax.Axis("vocab", shape.vocab)
        state = trainer.initial_state(training_key, model_init=lambda: gpt.build(Vocab, key=model_key))

    def step():
        nonlocal state
        with trainer.device_mesh:
            done = trainer.train_step(state, example)
        state = done.state
        return done.loss

    return step, sum(x.size for x in jax.tree_util.tree_leaves(trainer.trainable_params_only(state.model)))
