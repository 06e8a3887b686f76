"""Which collectives a run has, in which order, and when: the same on every worker.

Whether and when a collective happens is a function of the step's number and of what the current
generation has agreed on, never of one worker's history, clock or data. So each module that talks to
other workers has an entry here, which says when; a new generation begins every entry anew on all
workers (`group.Cadence`). `tests/ranks/test_agenda.py` compares this list with what runs do, for
all options, and finds modules that talk without an entry.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """Something the workers do together."""

    name: str
    modules: tuple[str, ...]
    """Those that talk for it, without `paceline.`."""
    when: str


BEGIN = (
    Entry("comparing arguments", ("run.build", "run.state"), "when a run begins"),
    Entry("wrapping", ("ddp.checks", "ddp.naive", "update.sharded"), "when a run begins"),
    Entry("healing", ("run.healing",), "when a generation begins"),
    Entry("joining islands", ("run.islands",), "before the first step, and after a missed round"),
)
STEP = (
    Entry("reading", ("run.loader", "run.user_loader"), "in every step, of data without a length"),
    Entry("embeddings", ("run.joint",), "in every step whose loss is over the whole batch"),
    Entry("statistics", ("ddp.sync_batch_norm",), "in every forward pass of such a layer"),
    Entry(
        "gradients",
        (
            *("ddp.reducer", "ddp.compress", "ddp.unbucketed"),
            *("ddp.naive", "ddp.ordered", "ddp.distributed", "ddp.torch_compat"),
        ),
        "in every step; the order of buckets and their memory in the first of a generation",
    ),
    Entry(
        "audit",
        ("ddp.audit",),
        "in steps of which two workers have different bits of a shard, said with the gradients, "
        "and once more when such a step was done again",
    ),
    Entry(
        "shards",
        ("run.parts",),
        "in the first step of a generation with more workers than shards, twice where it is "
        "computed in two cuts",
    ),
    Entry(
        "memory",
        ("run.fit",),
        "in steps in which a worker ran out of memory, said with the gradients or the embeddings",
    ),
    Entry("pace", ("telemetry.stragglers",), "by its cadence: steps 7, 12, ... of a generation"),
    Entry("vote", ("run.stop",), "by its cadence: the first step of a generation, then about 10/s"),
    Entry(
        "buffers",
        ("run.buffers",),
        "in the first step of a generation, in one in which a rank has news, said with its "
        "gradients, and in every step of a model whose buffers change",
    ),
    Entry(
        "update",
        ("update.whole", "update.shares", "update.sharded"),
        "in every step that is shared out; where a gradient is not finite, which all see alike",
    ),
    Entry("round", ("run.islands",), "by number: every so many steps, and after the last one"),
    Entry("recording", ("record.step",), "in steps to be recorded, agreed on by number or by vote"),
)
BETWEEN_STEPS = (
    Entry(
        "evaluating",
        ("run.buffers", "run.evaluation"),
        "in evaluations: of a model that has buffers, and of those that collect predictions",
    ),
    Entry("exchanges", ("run.recovery",), "at the end of an epoch, evaluations, saves, the end"),
    Entry("noise", ("policy.noise",), "in loops without a run, which has it among its exchanges"),
    Entry(
        "saving",
        ("run.state", "run.broadcast", "update.shares"),
        "when all save: by step, epoch or metric; with same_bits, also to hash what is shared out, "
        "every 100 steps and after the last",
    ),
)
AGENDA = (*BEGIN, *STEP, *BETWEEN_STEPS)
"""In the order in which they happen."""
