"""Fine-tuning beside torch with transformers: the same 50 steps of AdamW on the same packed batches, in f32."""

import numpy as np
import optax
import pytest

import jaxshard as js
from tests.hf.checkpoints import VOCAB

STEPS, ROWS, SEQ = 50, 8, 32
RATE, DECAY = 1e-3, 0.1
SLOW = 1e-4  # for weights so large that the first steps at the other rate raise the loss, and rounding with it

CASES = [
    ("llama", "data=8", js.explicit(), RATE),
    ("llama-llama3", "data=2,tensor=2,pipe=2", js.pipelined(microbatches=2), RATE),
    ("gemma3", "data=8", js.auto(), SLOW),
    ("gpt2", "data=8", js.explicit(), RATE),
]


def make_source():
    """Packed documents of which answers alone are learned, without the token 0: torch does not train padding."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, SEQ, 300)
    docs = js.data.documents(
        [rng.integers(1, VOCAB, size) for size in sizes],
        answers=[np.arange(size) >= min(3, size - 1) for size in sizes],
        vocab=VOCAB,
    )
    return js.data.packed(docs, batch=ROWS, seq=SEQ, seed=0)


def unpack(batch):
    """Each document of a batch in a row of its own: tokens, targets and weights [documents, SEQ]."""
    found = []
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            here = batch["segment_ids"][row] == segment
            found.append(
                [np.pad(batch[name][row][here], (0, SEQ - here.sum())) for name in ("tokens", "targets", "weights")]
            )
    return [np.stack(parts) for parts in zip(*found, strict=True)]


def train_with_torch(model, batches, rates):
    """Losses of the steps: the sum of nats over the documents, each of which torch sees alone, over their weights."""
    import torch

    tx = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    losses = []
    for batch, rate in zip(batches, rates, strict=True):
        tokens, targets, weights = map(torch.from_numpy, unpack(batch))
        logits = model(tokens.long()).logits  # padding comes behind the documents, where causal attention ends
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), reduction="none")
        loss = (nats * weights.flatten()).sum() / weights.sum()
        for group in tx.param_groups:
            group["lr"] = float(rate)
        tx.zero_grad()
        loss.backward()
        tx.step()
        losses.append(loss.item())
    return np.array(losses)


def show(case, ours, theirs, capsys):
    """Prints the largest relative difference of two curves, and returns it."""
    largest = float(np.abs(ours / theirs - 1).max())
    with capsys.disabled():
        print(
            f"\n{case}: {len(ours)} steps, loss {theirs[0]:.4f} to {theirs[-1]:.4f}, the largest relative difference "
            f"from torch is {largest:.1e}"
        )
    return largest


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mesh", "engine", "rate"), CASES)
def test_fifty_steps_have_the_losses_of_torch_to_1e_3(case, mesh, engine, rate, tmp_path, capsys):
    """Relative, in every step; the weights come from the folder that transformers wrote."""
    pytest.importorskip("torch")
    from tests.hf.transformers_models import write

    theirs = write(case, tmp_path)
    source = make_source()
    batches = [source.rows(step, np.arange(ROWS)) for step in range(STEPS)]

    model = js.hf.model(tmp_path)
    tx = optax.adamw(rate, weight_decay=DECAY)
    axes = {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    parts = [js.fsdp("data", min_size=0)]
    others = {"tensor": js.tensor(), "pipe": js.pipeline("pipe", chunks=1)}
    parts += [part for name, part in others.items() if name in axes]
    layout = js.layout(js.compose(*parts), js.make_mesh(**axes), model.init, tx)
    run = js.init(model.init, tx, layout, 0, init_from=js.hf.load(tmp_path, layout))
    step, losses = js.make_step(model.loss, tx, layout, engine=engine), []
    with js.batches(source, layout) as ours:
        for _, batch in zip(range(STEPS), ours, strict=False):
            run, metrics = step(run, batch)
            losses.append(float(metrics["loss"]))

    expected = train_with_torch(theirs, batches, [rate] * STEPS)
    assert expected[-1] < expected[0]
    assert show(f"{case} on {mesh}", np.array(losses), expected, capsys) < 1e-3
