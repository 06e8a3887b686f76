"""The live page of a training: read from its run folder, while it runs and after it has ended.

    run folder --read--> RunData --live--> one small message --server--> every open page

`follow` reads each run once, however many pages show it; `live` is the run's current state;
`server` checks requests and answers them; `command` is `paceline watch`. Watching does not affect
the run: it only reads the folder.
"""
