"""Saving: all ranks write, rank 0 commits with one rename.

background.py              Saves in a thread beside training, from a copy of the state
commit.py                  The phases of a save: prepare, write, commit, verify, prune
interval.py                After which steps a save is due, fixed or by Young's formula
lease.py                   The lease: one attempt writes a run, the next one takes over safely
replicas.py                Compares the copies of weights that several ranks hold
retention.py               Which old checkpoints are kept, and the removal of the others
snapshot.py                The copy of a rank's state in host memory
"""
