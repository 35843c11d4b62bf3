"""``--backend axrl``: the same experiments through AXRL's own ``MegatronWorker.reproduce_spike``.

    contract   what of AXRL is called, read and answered, held against its source; no torch
    missing    what a machine lacks to run it; no torch
    session    the parent's side; no torch
    seams      which patches a replay directory can express
    directory  the replay directory that holds an experiment's batch, settings and routes
    board      plain values between the ranks of a job, through files
    worker     a rank: AXRL's worker, one replay directory after the other

What it is for and what it needs: docs/backends.md.
"""
