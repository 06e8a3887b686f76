"""A script for Hugging Face Accelerate, with two lines added for Paceline.

paceline run --workers 2 examples/frameworks/accelerate_loop.py
"""

import paceline

paceline.enable()  # before libraries that use torch's classes are imported

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    on_cpu = not torch.cuda.is_available()  # without it, every worker would train alone
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=2)
    set_seed(0)
    x = torch.randn(256, 8)
    y = (x.sum(dim=1) > 0).long()
    train = DataLoader(TensorDataset(x[:192], y[:192]), batch_size=8, shuffle=True)
    test = DataLoader(TensorDataset(x[192:], y[192:]), batch_size=10)

    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, train, test, scheduler = accelerator.prepare(
        model, optimizer, train, test, scheduler
    )
    accelerator.print(f"engine: {type(model).__module__.partition('.')[0]}")
    for epoch in range(3):
        model.train()
        for inputs, targets in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        hits = []
        for inputs, targets in test:
            with torch.no_grad():
                guesses = model(inputs).argmax(dim=1)
            hits.append(accelerator.gather_for_metrics(guesses == targets))
        right = torch.cat(hits)
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.8f}, {right.sum()} of {len(right)} right")
    names = ", ".join(accelerator.get_state_dict(model))
    accelerator.print(f"to be saved: {names}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
