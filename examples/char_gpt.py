"""A small GPT that learns five sonnets character by character, then writes a line.

    paceline run --workers 2 examples/char_gpt.py

The learning rate warms up and decays; the run prints how it was chosen. Started again, the run
resumes from its folder, unless it is complete: `paceline report runs/char_gpt`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.policy import LearningRate, LearningRateScheduler

TEXT = (Path(__file__).parent / "sonnets.txt").read_text(encoding="ascii")
LETTERS = sorted(set(TEXT))
WIDTH, LENGTH, BATCH = 48, 32, 32


def encode(text: str) -> Tensor:
    return torch.tensor([LETTERS.index(letter) for letter in text])


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding.from_pretrained(torch.randn(len(LETTERS), WIDTH) / 7, False)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 7)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        hidden = self.blocks(self.letters(x) + self.places[:length], mask, is_causal=True)
        hidden = F.layer_norm(hidden, (WIDTH,))
        return F.linear(hidden, self.letters.weight)  # tied embeddings


@torch.no_grad()
def write(model: nn.Module, start: str, count: int) -> str:
    text = encode(start)[None]
    for _ in range(count):
        scores = model(text[:, -LENGTH:])[:, -1] / 0.5
        text = torch.cat([text, torch.multinomial(scores.softmax(-1), 1)], dim=1)
    return "".join(LETTERS[letter] for letter in text[0].tolist())


def main() -> None:
    with paceline.init_process_group() as world:
        paceline.seed_everything(0)
        net = GPT().to(world.device)
        dataset = TensorDataset(encode(TEXT).unfold(0, LENGTH + 1, 5))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        rate = LearningRate(global_batch=BATCH, warmup_steps=10, decay="cosine", steps=80)
        run = paceline.Run(
            net, optimizer, dataset, global_batch=BATCH, epochs=4, folder="runs/char_gpt",
            scheduler=LearningRateScheduler(optimizer, rate),
            options=paceline.RunOptions(policy=[rate.sentence]),
        )  # fmt: skip
        for step in run:
            with step:
                for (text,) in step.batches():
                    scores, targets = run.model(text[:, :-1]), text[:, 1:]
                    loss = F.cross_entropy(scores.mT, targets)
                    step.backward(loss, items=targets.numel())
        if world.is_main:
            print(write(net.cpu().eval(), "Shall ", 60).replace("\n", " / "))


if __name__ == "__main__":
    main()
