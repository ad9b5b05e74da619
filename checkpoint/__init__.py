"""Layout-free save and load; no pickle.

comm.py                    How the ranks of a save or load agree: one operation, `exchange`
export.py                  `python -m checkpoint.export RUN [--step N]`: a checkpoint as a Hug
fragments.py               What this rank owns of the weights and the optimizer's states: wher
lineage.py                 Segments of a run: which steps, checkpoints and lines belong to it
"""
