"""The measured models: each by name, with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Model:
    """One thing to train: `loss(module, batch)` is what a step differentiates."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        wider: Tensor = F.gelu(self.up(self.norm2(x)))
        out: Tensor = x + self.down(wider)
        return out


class GPT(nn.Module):
    """A small causal language model with tied embeddings."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def _classify(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def _next_token(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten())


def _rows(
    rows: int, width: int, classes: int
) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, width, generator=generator)
        return x, torch.randint(classes, (rows,), generator=generator)

    return batch


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (32,), generator=generator)


def _text(
    rows: int, length: int, vocabulary: int
) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (rows, length + 1), generator=generator)
        return text[:, :-1], text[:, 1:]

    return batch


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024)
    )


def _conv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


class Words(nn.Module):
    """Nearly all parameters are embeddings, of which a batch reads only a few."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.hidden, self.out = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(F.relu(self.hidden(self.words(words).mean(1))))
        return out


def _word_rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(20_000, (64, 16), generator=generator)
    return words, torch.randint(100, (64,), generator=generator)


def _deep(layers: int, width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    )


def _normed(layers: int, width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(layers))
    )


MODELS: dict[str, Model] = {
    "mlp-8.4M": Model(_mlp, _rows(32, 1024, 1024), _classify),
    "gpt-17M": Model(lambda: GPT(8192, 384, 8, 6, 128), _text(1, 128, 8192), _next_token),
    "conv-0.1M": Model(_conv, _images, _classify),
    "deep-200x64": Model(lambda: _deep(200, 64), _rows(32, 64, 64), _classify),
    "embedding-11M": Model(lambda: Words(20_000, 512, 100), _word_rows, _classify),
    "small-600": Model(lambda: _deep(300, 16), _rows(8, 16, 16), _classify),
    "normed-150x48": Model(lambda: _normed(150, 48), _rows(16, 48, 48), _classify),
}
