"""One process: the training loop that torch's peers bring to two."""

import torch
from shape import LEARNING_RATE, WEIGHT_DECAY
from torch_gpt import GPT, mean_loss


def build(shape, rank, meeting):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.from_numpy(shape.tokens()).long()
    model = GPT(shape)
    count = sum(x.numel() for x in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True)

    def step():
        optimizer.zero_grad()
        loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, count
