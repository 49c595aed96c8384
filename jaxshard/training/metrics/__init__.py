"""Callbacks for `fit` that write the metrics of every step to files, TensorBoard, W&B or MLflow, and plots of them.

run = js.fit(run, step, batches, steps=1000, callbacks=[js.metrics.json_lines("run/metrics.jsonl")])
"""

from jaxshard.training.metrics.curves import loss_figure as loss_figure
from jaxshard.training.metrics.curves import throughput_figure as throughput_figure
from jaxshard.training.metrics.events import tensorboard as tensorboard
from jaxshard.training.metrics.experiments import mlflow as mlflow
from jaxshard.training.metrics.lines import json_lines as json_lines
from jaxshard.training.metrics.lines import read_json_lines as read_json_lines
from jaxshard.training.metrics.weights_and_biases import wandb as wandb
from jaxshard.training.metrics.writer import Writer as Writer
from jaxshard.training.metrics.writer import finite as finite
from jaxshard.training.metrics.writer import flat as flat
