"""Saving: all ranks write, one rename commits.

background.py              Saves beside training: the state is copied, then a thread runs the
commit.py                  Saving: all ranks write, rank 0 decides once, a rename is the commi
interval.py                How many steps lie between two saves where the recipe says `auto`:
lease.py                   The lease: one attempt writes a run; the next one takes over from a de
replicas.py                Whether ranks that should hold the same working weights do: a diges
snapshot.py                A copy of what a rank writes, in host memory of its own, so that tr
"""
