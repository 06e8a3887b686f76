"""Every option with every fault: whole trainings, in which every two of them meet in a case.

    factors     what can be chosen, what can go wrong when, and what excludes each other
    covering    cases in which all pairs of these meet: a pure function of a seed
    training    the script of all cases
    judge       runs a case, and says what is wrong with how it ended

`python -m tests.matrix` runs them all, or `--seed N --count M` a part. See docs/testing.md.
"""
