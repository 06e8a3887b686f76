"""A worker dies, the training does not.

    launcher                                            workers
       │ a worker ends (pidfd)                             │ step k
       ├── generation g+1: the others, urgent ──────────> │ their waits end with an error
       ├── starts a replacement (forked, milliseconds)     │ they meet, build a group,
       │                                                   │ compare how far each is; who is
       │ <──────────────────────────── joined g+1 ──────── │ behind is healed; step k anew,
       │ <──── ready ──── the replacement, at its loop     │ its shards dealt to who is left
       ├── generation g+2: all, between two steps ───────> │ they vote on the step, meet,
       │ <──────────────────────────── joined g+2 ──────── │ and heal the newcomer

`roster` decides who is in which generation, without any process. `link` is what launcher and worker
tell each other, and the ledger that a dead worker leaves. `groups` makes torch's default group
anew, `member` brings a worker from one generation to the next. The launcher's side that starts
processes is `launcher.generations`, the run's side that knows the state is `run.continuity`. On
several machines one launcher has the roster, and the others are its `launcher.follower`s: they pass
on both directions of the picture.
"""
