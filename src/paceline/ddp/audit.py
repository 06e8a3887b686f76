"""Shards that a second worker computes as well, and what follows where their bits differ.

A gradient that a chip has computed wrong looks like any other, and the sum hands it to all. But the
gradient of a shard is a function of parameters, samples and seed (see `ordered`), so two workers
that compute the same shard have the same bits, or one of them is wrong:

    chosen steps --> each shard by two --> equal: the step is summed and applied
                                      └──> different: the step is done again, each shard by another
                                           second worker; then the bits that two workers agree on
                                           are right, and the worker that had others is named

So are the parameters that they were computed with, which all workers have; of two workers whose
parameters differ, the one that began the step with others is wrong. Which steps are chosen,
and who computes what, is a function of seed, step and attempt. All shards of a step or none: then
every worker has as many more, and none waits. What is compared ends at the gradient of a shard:
the sum of all of them is not covered, but on whom it leaves other parameters.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import AuditError, PeerError, name_ranks
from paceline.files import as_plain, memory_of
from paceline.group import Membership, exchange

WORDS = 2
"""A digest is told as so many numbers of 32 bits: a sum of float64 carries those exactly."""
WEIGHT = "the weight of its loss"
PARAMETERS = -1
"""Instead of a shard: what all workers have before the step."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one worker has computed of one shard: a digest per parameter, by its place."""

    rank: int
    digests: list[str]
    """The first is that of the weight; "" where the parameter has no gradient."""
    is_kept: bool = False
    """Of parameters: whether this worker has had them since the step began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Who was wrong, where, as all workers have found alike."""

    step: int
    shard: int
    culprit: int | None
    """Its rank; None: not known."""
    others: list[int]
    """The ranks that agree with each other, or all that computed the shard."""
    parameter: str
    where: str
    """Host and device of the culprit."""

    @property
    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text}

    @property
    def text(self) -> str:
        others = name_ranks(self.others)
        if self.shard == PARAMETERS:
            who = f"rank {self.culprit} ({self.where}) has other parameters than {others}"
            if self.culprit is None:
                who = f"{others} have different parameters, and it stays open which are right"
            return f"Step {self.step}: {who}. The first that differs is {self.parameter!r}."
        first = f"The first that differs is the gradient of {self.parameter!r}."
        if self.parameter == WEIGHT:
            first = f"What differs is {WEIGHT}."
        if self.culprit is None:
            return (
                f"Step {self.step}: {others} do not agree on the gradient of shard {self.shard}, "
                f"twice, and it stays open which one is right. {first}"
            )
        return (
            f"Step {self.step}: rank {self.culprit} ({self.where}) computed another gradient of "
            f"shard {self.shard} than {others}. {first}"
        )


@dataclass(slots=True, kw_only=True)
class Audit:
    """The audit of one run: what is chosen, what was computed of it, and what is disputed.

    Invariant: `attempt`, `is_disputed` and `finding` are the same on all workers between two sums.
    """

    share: float
    """In how many of the steps shards are computed twice, of 1."""
    seed: int
    shards: int
    names: Sequence[str] = ()
    """Of the parameters, in the order of digests."""
    replaces: bool = False
    """Whether a worker that is named gives its place to another one."""
    attempt: int = 0
    """How often the step under way was done before."""
    is_disputed: bool = False
    """Whether two workers have different bits of a shard of the step that was just summed."""
    finding: Finding | None = None
    """What the last dispute came to, until it is told."""
    _step: int = 0
    _mine: dict[tuple[int, bool], list[str]] = field(default_factory=dict)
    """By shard and whether this was the second time: the digests of this attempt."""
    _earlier: dict[int, list[Claim]] = field(default_factory=dict)
    """By shard: what was said of those that are disputed, in the attempt before."""
    _kept: tuple[int, list[str]] = 0, []
    """A step, and the parameters that this worker began it with."""

    def chosen(self, step: int) -> list[int]:
        """The shards of a step that are computed twice."""
        return list(range(self.shards)) if self._draw(step) < self.share * 2**64 else []

    def seconds_of(self, step: int, rank: int, size: int) -> list[int]:
        """The shards of a step that this rank computes besides its own."""
        # Samples of later steps are loaded ahead, and no worker has attempted those.
        attempt = self.attempt if step == self._step else 0
        return [
            shard for shard in self.chosen(step) if self._second(step, shard, attempt, size) == rank
        ]

    def _second(self, step: int, shard: int, attempt: int, size: int) -> int:
        if size == 1:
            return 0
        # Never the shard's own worker, which is `shard % size`; in the next attempt another one.
        offset = (self._draw(step) + attempt) % (size - 1)
        return (shard + 1 + offset) % size

    def _draw(self, step: int) -> int:
        drawn = hashlib.sha256(f"audit {self.seed} {step}".encode()).digest()
        return int.from_bytes(drawn[:8])

    def begin(self, step: int) -> None:
        """A step begins, or the same one again."""
        if step != self._step:
            self._step, self.attempt, self._earlier = step, 0, {}
        self.is_disputed, self._mine = False, {}

    def forget(self) -> None:
        """Ranks have changed: the worker in question may be gone."""
        self._step, self._kept = 0, (0, [])
        self.begin(0)

    def keep(self, step: int, parameters: Iterable[Tensor], size: int) -> None:
        """A step is dealt: keep what two workers have then. Of three, two have the right ones."""
        if size == 2 and step != self._kept[0] and self.chosen(step):
            self._kept = step, _digests_of(each for each in parameters if each.requires_grad)

    def note(
        self, shard: int, is_second: bool, weight: float, gradients: Sequence[Tensor | None]
    ) -> None:
        """A shard is computed: keep what will be compared."""
        if is_second or shard in self.chosen(self._step):
            digests = [_digest(repr(weight).encode())]
            digests += ["" if grad is None else _digest(_bytes_of(grad)) for grad in gradients]
            self._mine[shard, is_second] = digests

    def words(self, parameters: Sequence[Tensor], rank: int, size: int) -> list[float]:
        """What this worker tells of the step's shards, and of its parameters; others add zeros."""
        chosen = self.chosen(self._step)
        found = [
            word
            for shard in chosen
            for is_second in (False, True)
            for word in self._words_of(shard, is_second)
        ]
        if not chosen or size == 1:
            return found
        self._mine[PARAMETERS, False] = _digests_of(parameters)
        mine = self._words_of(PARAMETERS, False)
        return [*found, *(w if r == rank else 0.0 for r in range(size) for w in mine)]

    def _words_of(self, shard: int, is_second: bool) -> list[float]:
        digests = self._mine.get((shard, is_second))
        whole = bytes.fromhex(_digest("".join(digests).encode())) if digests else bytes(8)
        return [float(int.from_bytes(whole[at : at + 4])) for at in (0, 4)]

    def settle(self, words: Sequence[float], members: Membership, device: torch.device) -> None:
        """All workers have told their words: go on, do the step again, or raise.

        Raises `AuditError` on the culprit, and on all where no worker can be named; a `PeerError`
        on the others, which continue without it where the launcher can replace it.
        """
        chosen, each = self.chosen(self._step), 2 * WORDS
        told = [words[at * each : (at + 1) * each] for at in range(len(chosen))]
        disputed = [s for s, w in zip(chosen, told, strict=True) if w[:WORDS] != w[WORDS:]]
        of_ranks = words[len(chosen) * each :]
        if any(of_ranks[at] != of_ranks[at % WORDS] for at in range(len(of_ranks))):
            disputed.insert(0, PARAMETERS)
        if not disputed and not self._earlier:
            return
        told_of = sorted({*disputed, *self._earlier})
        claims, places = self._exchange(told_of, members, device)
        if not self.attempt:
            self.attempt, self._earlier, self.is_disputed = 1, claims, True
            return
        earlier, self._earlier = self._earlier, {}
        findings = [
            self._judge(shard, [*earlier[shard], *claims.get(shard, [])], members.size, places)
            for shard in sorted(earlier)  # parameters explain what differs in gradients
        ]
        self.finding = found = min(findings, key=lambda each: each.culprit is None)
        named = {each.culprit for each in findings}
        if found.culprit is not None and not disputed and not (self.replaces and members.size > 1):
            return  # it was wrong once, and this time all of them agree
        advice = "Look at that machine's memory and processor."
        if found.culprit is None or members.rank in named:
            if found.culprit is not None and self.replaces:
                self.finding = None  # the others tell of it
            is_open = found.culprit is None
            raise AuditError(
                f"{found.text} The step was not applied.", advice=advice, ends_run=is_open
            )
        raise PeerError(f"{found.text} The step was not applied.", advice=advice)

    def _exchange(
        self, shards: Sequence[int], members: Membership, device: torch.device
    ) -> tuple[dict[int, list[Claim]], list[str]]:
        """By shard what every worker has of it, and where the workers are."""
        mine = [
            [shard, digests, shard == PARAMETERS and self._kept == (self._step, digests)]
            for (shard, _), digests in self._mine.items()
            if shard in shards
        ]
        here, what = socket.gethostname(), f"Step {self._step}: comparing disputed gradients"
        told = exchange(members.group, [f"{here}, {device}", mine], members.word_device, what)
        claims: dict[int, list[Claim]] = {}
        for rank, (_, theirs) in enumerate(told):
            for shard, *claim in theirs:
                claims.setdefault(shard, []).append(Claim(rank, *claim))
        return claims, [place for place, _ in told]

    def _judge(
        self, shard: int, claims: Sequence[Claim], size: int, places: Sequence[str]
    ) -> Finding:
        right = find_right(claims, size)
        ranks = sorted({claim.rank for claim in claims})
        wrong = next((each for each in claims if each.digests != right), claims[0])
        against = next(each for each in claims if each.digests != wrong.digests)
        culprit = wrong.rank if right is not None else None
        if culprit is not None:
            agreed = {claim.rank for claim in claims if claim.digests == right}
            ranks = sorted(agreed - {culprit}) or [culprit]
        pairs = zip([WEIGHT, *self.names], wrong.digests, against.digests, strict=True)
        return Finding(
            step=self._step,
            shard=shard,
            culprit=culprit,
            others=ranks,
            parameter=next(name for name, one, other in pairs if one != other),
            where="" if culprit is None else places[culprit],
        )


def find_right(claims: Sequence[Claim], size: int) -> list[str] | None:
    """The digests that two workers have, or, where there is no third, that one worker has had more
    than once while the other contradicts itself; None where there are none, or several."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for claim in [each for each in claims if each.is_kept] or claims:
        ranks.setdefault(tuple(claim.digests), []).append(claim.rank)
    twice = [digests for digests, by in ranks.items() if len(by) > 1]
    good = [digests for digests in twice if len(set(ranks[digests])) > 1]
    if size < 3:
        good = good or twice
    return list(good[0]) if len(good) == 1 else None


def _digests_of(parameters: Iterable[Tensor]) -> list[str]:
    return ["", *(_digest(_bytes_of(each)) for each in parameters)]


def _bytes_of(tensor: Tensor) -> bytes:
    plain = as_plain(tensor.to_dense() if tensor.is_sparse else tensor)
    return bytes(memory_of(plain))


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
