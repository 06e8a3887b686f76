"""Small models for tests of the engines, each with one thing that has broken an engine somewhere.

A case promises, and `tests/unit/test_zoo.py` checks:

- `build()` gives the same model every time, on every thread: parameters come from a generator.
- `batch(rows)` gives the same tensors every time, each with the rows in its first dimension, and
  the rows of a smaller batch are the first ones of a larger.
- `loss(model, inputs)` is a mean over rows, so the losses and gradients of equal shards average
  to those of the whole batch. `model` is called, never looked into, so it may be wrapped.

A case does not cross to another process; its name does, and `named(name)` finds it there.

To add a case, write a function that builds the model, decorate it with `@case("what is odd")`, and
pass `batch=` and `loss=` where the defaults (rows of WIDTH features, a regression) do not fit.
Say in `traits=` what a test may want to leave out or expect:

    unused     a parameter never has a gradient       varying   which ones do depends on the rows
    sparse     a sparse gradient                      complex   a complex parameter
    mixed      several dtypes                         rough     computes in half precision
    inner      calls autograd inside the loss         frozen    a parameter requires no gradient
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6
TOKENS = 5
VOCABULARY = 11

Inputs = tuple[Tensor, ...]
Loss = Callable[[Callable[..., Any], Inputs], Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its data, and what is to be minimised."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Inputs]
    loss: Loss
    traits: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def train_some(model: Any, case: Case, world: Any, *, rows: int = 12, **sgd: Any) -> Any:
    """Four steps on this rank's rows; what the model is then."""
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    for _ in range(4):
        optimizer.zero_grad()
        case.loss(model, shard(case.batch(rows), world.rank, world.size)).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def shard(inputs: Inputs, rank: int, size: int) -> Inputs:
    """The rows of one rank: equal, consecutive parts."""
    rows = len(inputs[0]) // size
    return tuple(part[rank * rows : (rank + 1) * rows] for part in inputs)


def named(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """Refill parameters and random buffers from a generator, small enough to train with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *_random_buffers(module)]:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            wide = torch.complex64 if tensor.is_complex() else torch.float32
            drawn = torch.randn(tensor.shape, generator=generator, dtype=wide)
            tensor.copy_(drawn / max(1, tensor.shape[-1] if tensor.dim() else 1) ** 0.5)
    return module


def _random_buffers(module: nn.Module) -> list[Tensor]:
    """Spectral norm starts from random vectors of length one."""
    return [b for name, b in module.named_buffers() if name.rpartition(".")[2] in {"_u", "_v"}]


def features(rows: int) -> Inputs:
    """Rows of WIDTH features, and two numbers to predict from each."""
    return rows_of(rows, (WIDTH,)), rows_of(rows, (2,), seed=1)


def images(rows: int) -> Inputs:
    return rows_of(rows, (3, 8, 8)), rows_of(rows, (2,), seed=1)


def sequences(rows: int) -> Inputs:
    return rows_of(rows, (TOKENS, WIDTH)), rows_of(rows, (2,), seed=1)


def tokens(rows: int) -> Inputs:
    """Rows of token numbers, and the next token at every place."""
    text = (rows_of(rows, (TOKENS + 1,)).abs() * 1000).long() % VOCABULARY
    return text[:, :-1], text[:, 1:]


def words(rows: int) -> Inputs:
    """Rows of token numbers, and two numbers to predict from each."""
    return tokens(rows)[0], rows_of(rows, (2,), seed=1)


def rows_of(rows: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Normal numbers, row by row, so that a smaller batch is the start of a larger one."""
    generators = (torch.Generator().manual_seed(seed * 10_000 + row) for row in range(rows))
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def regression(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    *arguments, target = inputs
    return F.mse_loss(model(*arguments), target)


def next_token(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    text, target = inputs
    return F.cross_entropy(model(text).flatten(0, 1), target.flatten())


def case(
    name: str,
    batch: Callable[[int], Inputs] = features,
    loss: Loss = regression,
    traits: Sequence[str] = (),
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Put the decorated builder into the zoo, its parameters filled."""

    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES.append(Case(name, lambda: filled(build()), batch, loss, frozenset(traits)))
        return build

    return add


# Plain models


@case("mlp")
def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    )


@case("one parameter")
def one_parameter() -> nn.Module:
    return nn.Linear(WIDTH, 2, bias=False)


@case("dropout of nothing")
def dropout_of_nothing() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.0), nn.Linear(WIDTH, 8), nn.Dropout(0.0), nn.Linear(8, 2))


@case("convolutions", batch=images)
def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


@case("convolutions, channels last", batch=images)
def convolutions_channels_last() -> nn.Module:
    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def forward(self, x: Tensor) -> Any:
            return self.body(x.contiguous(memory_format=torch.channels_last))

    return ChannelsLast()


@case("lstm", batch=sequences)
def lstm() -> nn.Module:
    return LastStep(nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True), 5)


@case("gru, both ways", batch=sequences)
def gru_both_ways() -> nn.Module:
    return LastStep(nn.GRU(WIDTH, 4, bidirectional=True, batch_first=True), 8)


class LastStep(nn.Module):
    """Predicts from the last state of a recurrent layer."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Any:
        states, _ = self.recurrent(x)
        return self.head(states[:, -1])


@case("transformer encoder of torch", batch=sequences)
def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(TOKENS * WIDTH, 2))


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.after_attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Any:
        rows, length, width = x.shape
        parts = self.attention(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.after_attention(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(x)


class TinyGPT(nn.Module):
    """Embeddings, blocks, a head; the head may be the embedding itself."""

    def __init__(self, is_tied: bool, use_checkpoint: bool | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.places = nn.Parameter(torch.empty(TOKENS, 8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.use_checkpoint = use_checkpoint
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Any:
        x = self.tokens(text) + self.places
        for block in self.blocks:
            if self.use_checkpoint is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_checkpoint)
        return self.head(self.norm(x))


@case("tiny GPT", batch=tokens, loss=next_token)
def tiny_gpt() -> nn.Module:
    return TinyGPT(is_tied=False)


# Parameters of odd kinds, sizes and places


@case("tied weights", batch=tokens, loss=next_token)
def tied_weights() -> nn.Module:
    return TinyGPT(is_tied=True)


@case("embedding with padding", batch=words)
def embedding_with_padding() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 4, padding_idx=0), nn.Flatten(), nn.Linear(TOKENS * 4, 2)
    )


@case("sparse embedding", batch=words, traits=["sparse"])
def sparse_embedding() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 4, sparse=True), nn.Flatten(), nn.Linear(TOKENS * 4, 2)
    )


@case("sparse embedding bag", batch=words, traits=["sparse"])
def sparse_embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(VOCABULARY, 4, mode="sum", sparse=True), nn.Linear(4, 2))


@case("only a sparse embedding", batch=words, traits=["sparse"])
def only_a_sparse_embedding() -> nn.Module:
    return nn.EmbeddingBag(VOCABULARY, 2, mode="mean", sparse=True)


@case("complex parameters", traits=["complex", "mixed"])
def complex_parameters() -> nn.Module:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.empty(WIDTH, 4, dtype=torch.complex64))
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            turned = x.to(torch.complex64) @ self.turn
            return self.head(torch.view_as_real(turned).flatten(1))

    return Rotation()


@case("a parameter that is a conjugate view", traits=["complex", "mixed"])
def conjugate_view() -> nn.Module:
    model: Any = complex_parameters()
    model.turn = nn.Parameter(model.turn.detach().conj())
    return model


@case("dtypes mixed", traits=["mixed", "rough"])
def dtypes_mixed() -> nn.Module:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_float32 = nn.Linear(WIDTH, 4)
            self.in_bfloat16 = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.in_float64 = nn.Linear(4, 2, dtype=torch.float64)

        def forward(self, x: Tensor) -> Any:
            x = self.in_bfloat16(self.in_float32(x).bfloat16())
            return self.in_float64(x.double()).float()

    return Mixed()


@case("everything in bfloat16", traits=["rough"])
def everything_in_bfloat16() -> nn.Module:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp().bfloat16()

        def forward(self, x: Tensor) -> Any:
            return self.body(x.bfloat16()).float()

    return Half()


class Scaled(nn.Module):
    """A linear layer between parameters of unusual shapes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.odd = nn.ParameterList([torch.empty(shape) for shape in shapes])
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        total: Tensor | float = 1.0
        for odd in self.odd:
            total = total + odd.sum() / max(1, odd.numel())
        return self.linear(x) * total


@case("scalar parameters")
def scalar_parameters() -> nn.Module:
    return Scaled((), (1,), (1, 1, 1))


@case("empty parameters")
def empty_parameters() -> nn.Module:
    return Scaled((0,), (3, 0, 2), ())


@case("very large next to very small")
def very_large_next_to_very_small() -> nn.Module:
    return Scaled((600, 700), (), (2,), (300, 1000), (1,))


@case("200 tiny parameters")
def many_tiny_parameters() -> nn.Module:
    return Scaled(*[(1 + i % 3,) for i in range(198)])


@case("integer parameter", traits=["frozen", "mixed"])
def integer_parameter() -> nn.Module:
    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
            self.linear = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x[:, self.order])

    return Permuted()


@case("parameters that are not contiguous")
def not_contiguous() -> nn.Module:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, WIDTH).t())
            self.every_second = nn.Parameter(torch.empty(8)[::2])
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head(x @ self.weight + self.every_second)

    return Transposed()


@case("a part of a parameter used")
def part_of_a_parameter_used() -> nn.Module:
    class Slice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(WIDTH + 3, 5))

        def forward(self, x: Tensor) -> Any:
            return x @ self.table[2 : 2 + WIDTH, :2]

    return Slice()


@case("lists and dicts of parameters")
def lists_and_dicts_of_parameters() -> nn.Module:
    class Containers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ParameterList([torch.empty(WIDTH, WIDTH) for _ in range(3)])
            self.heads = nn.ParameterDict({"left": torch.empty(WIDTH), "right": torch.empty(WIDTH)})

        def forward(self, x: Tensor) -> Any:
            for step in self.steps:
                x = torch.tanh(x @ step)
            return torch.stack([x @ self.heads["left"], x @ self.heads["right"]], dim=1)

    return Containers()


@case("deeply nested modules")
def deeply_nested() -> nn.Module:
    module: nn.Module = nn.Linear(WIDTH, WIDTH)
    for _ in range(12):
        module = nn.Sequential(nn.ModuleDict({"x": module})["x"], nn.Tanh())
    return nn.Sequential(module, nn.Linear(WIDTH, 2))


@case("weight norm")
def weight_norm() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(WIDTH, 8))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 2))


@case("spectral norm")
def spectral_norm() -> nn.Module:
    # In evaluation mode, because each forward in training moves the vectors it starts from.
    layer = parametrizations.spectral_norm(nn.Linear(WIDTH, 8)).eval()
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 2))


@case("constant buffers")
def constant_buffers() -> nn.Module:
    class Masked(nn.Module):
        keep: Tensor
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keep", torch.arange(WIDTH) % 3 > 0)
            self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH), persistent=False)
            self.linear = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x * self.keep * self.scale)

    return Masked()


# Parameters that take no part


@case("frozen at the start", traits=["frozen"])
def frozen_at_the_start() -> nn.Module:
    model = mlp()
    next(iter(model.children())).requires_grad_(False)
    return model


@case("frozen but for a bias", traits=["frozen"])
def frozen_but_for_a_bias() -> nn.Module:
    model = mlp().requires_grad_(False)
    list(model.parameters())[1].requires_grad_(True)
    return model


@case("unused on every rank", traits=["unused"])
def unused_on_every_rank() -> nn.Module:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.spare = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Any:
            return self.last(torch.tanh(self.first(x)))

    return Spare()


def first_output(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    *arguments, target = inputs
    return F.mse_loss(model(*arguments)[0], target)


@case("an output not in the loss", loss=first_output, traits=["unused"])
def output_not_in_the_loss() -> nn.Module:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, 4)
            self.used, self.ignored = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            x = torch.tanh(self.body(x))
            return self.used(x), self.ignored(x)

    return TwoHeads()


@case("unused depending on the rows", traits=["varying"])
def unused_depending_on_the_rows() -> nn.Module:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(4)])

        def forward(self, x: Tensor) -> Any:
            output = x.new_zeros(len(x), 2)
            choice = (x[:, 0].abs() * 10).long() % len(self.experts)
            for number, expert in enumerate(self.experts):
                chosen = (choice == number).nonzero().flatten()
                if len(chosen) > 0:
                    output = output.index_add(0, chosen, expert(x[chosen]))
            return output

    return Experts()


@case("one row at a time, each as deep as it says", traits=["varying"])
def as_deep_as_each_row_says() -> nn.Module:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Any:
            rows = []
            for row in x.unbind(0):
                depth = int(row[1].abs() * 10) % (len(self.layers) + 1)
                for layer in self.layers[:depth]:
                    row = torch.tanh(layer(row))
                rows.append(self.head(row))
            return torch.stack(rows)

    return Depth()


# Layers used several times, or computed again in backward


@case("a layer used several times")
def layer_used_several_times() -> nn.Module:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Any:
            for _ in range(4):
                x = torch.tanh(self.step(x)) + x
            return self.head(x)

    return Loop()


def called_twice(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    x, target = inputs
    return F.mse_loss(model(x) - model(x.flip(1)), target)


@case("a model called twice before backward", loss=called_twice)
def model_called_twice() -> nn.Module:
    return mlp()


@case("checkpoint", batch=tokens, loss=next_token)
def checkpointed() -> nn.Module:
    return TinyGPT(is_tied=False, use_checkpoint=False)


@case("checkpoint, reentrant", batch=tokens, loss=next_token)
def checkpointed_reentrant() -> nn.Module:
    return TinyGPT(is_tied=False, use_checkpoint=True)


@case("checkpoint, tied weights", batch=tokens, loss=next_token)
def checkpointed_tied() -> nn.Module:
    return TinyGPT(is_tied=True, use_checkpoint=False)


class CheckpointedTwice(nn.Module):
    """One layer computed again twice in one backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.again, x, use_reentrant=self.use_reentrant))
        return self.head(x)


@case("checkpoint, one layer twice")
def checkpointed_twice() -> nn.Module:
    return CheckpointedTwice(use_reentrant=False)


@case("checkpoint, reentrant, one layer twice")
def checkpointed_reentrant_twice() -> nn.Module:
    return CheckpointedTwice(use_reentrant=True)


# Inputs and outputs in containers


class Heads(nn.Module):
    """Two layers whose outputs a subclass wraps up."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)


@dataclass
class Answer:
    left: Tensor
    rest: list[Tensor]


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def two_answers(left: Tensor, right: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(left, target) + F.mse_loss(right, -target)


def dict_answer(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    output = model(inputs[0])
    return two_answers(output["left"], output["more"]["right"], inputs[1])


@case("output in a dict", loss=dict_answer)
def output_in_a_dict() -> nn.Module:
    class InADict(Heads):
        def forward(self, x: Tensor) -> Any:
            return {"left": self.left(x), "more": {"right": self.right(x), "name": "x"}}

    return InADict()


def dataclass_answer(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    output = model(inputs[0])
    return two_answers(output.left, output.rest[0], inputs[1])


@case("output in a dataclass", loss=dataclass_answer)
def output_in_a_dataclass() -> nn.Module:
    class InADataclass(Heads):
        def forward(self, x: Tensor) -> Any:
            return Answer(self.left(x), [self.right(x)])

    return InADataclass()


def named_tuple_answer(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    output = model(inputs[0])
    return two_answers(output.left, output.right, inputs[1])


@case("output in a named tuple", loss=named_tuple_answer)
def output_in_a_named_tuple() -> nn.Module:
    class InANamedTuple(Heads):
        def forward(self, x: Tensor) -> Any:
            return Pair(self.left(x), self.right(x))

    return InANamedTuple()


def three_inputs(rows: int) -> Inputs:
    x, target = features(rows)
    return x, x.roll(1, dims=1), x[:, :2] * 2, target


def keyword_inputs(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    a, b, c, target = inputs
    return F.mse_loss(model(a, {"b": [b], "note": "x"}, scale=c), target)


@case("inputs in containers and by name", batch=three_inputs, loss=keyword_inputs)
def inputs_in_containers() -> nn.Module:
    class Several(Heads):
        def forward(self, a: Tensor, more: dict[str, Any], *, scale: Tensor) -> Any:
            return self.left(a) + self.right(more["b"][0]) * scale

    return Several()


# Autograd beyond the ordinary


class Breaks(torch.autograd.Function):
    """Its backward raises, unless told otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, breaks: bool = True) -> Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.breaks:
            raise MemoryError("broken")
        return grad, None


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 2)


@case("an autograd function of one's own")
def own_autograd_function() -> nn.Module:
    class Clip(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Clipped.apply(x)  # type: ignore[no-untyped-call]

    return nn.Sequential(nn.Linear(WIDTH, 8), Clip(), nn.Linear(8, 2))


@case("hooks on modules and tensors")
def hooks_on_modules_and_tensors() -> nn.Module:
    first, last = nn.Linear(WIDTH, 8), nn.Linear(8, 2)
    last.register_full_backward_hook(lambda module, grads_in, grads_out: None)
    first.register_forward_hook(lambda module, inputs, output: output * 2)
    last.weight.register_hook(lambda grad: grad * 3)  # type: ignore[no-untyped-call]
    return nn.Sequential(first, nn.Tanh(), last)


def smooth(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    x = inputs[0].detach().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.mse_loss(output, inputs[1]) + slope.square().sum(1).mean()


@case("a penalty on the slope", loss=smooth, traits=["inner"])
def penalty_on_the_slope() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))
