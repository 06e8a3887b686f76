"""The live page of a training: read from its run folder, while it runs and after it has ended.

    run folder --read--> RunData --live--> one small message --server--> every open page

`follow` reads each run once, however many pages show it; `live` says how the run is now; `server`
is who may ask for what, and what a browser gets; `command` is `paceline watch`. The run does not
know that it is watched.
"""
