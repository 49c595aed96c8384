"""Two processes by torch's DistributedDataParallel over gloo."""

import torch
from shape import LEARNING_RATE, WEIGHT_DECAY
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch_gpt import GPT, mean_loss


def build(shape, rank, meeting):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    tokens = torch.from_numpy(shape.tokens()).long().chunk(2)[rank]
    model = GPT(shape)
    count = sum(x.numel() for x in model.parameters())
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True)

    def step():
        optimizer.zero_grad()
        loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, count
