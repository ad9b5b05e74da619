"""What a checkpoint is on disk.

blocks.py                  Files of a checkpoint as blocks with a digest each: a part can be c
epochs.py                  Epochs: whose turn it is to write a run, as files that are made onc
index.py                   What lies where: the index of the pieces a rank wrote, all indexes
index_file.py              Names of a rank's files, and its index as JSON; no torch
manifest.py                MANIFEST.json: the file that makes a folder a checkpoint, and the n
rectangles.py              The algebra of pieces: a flat range of a (sharded) tensor as rectan
state.py                   The small JSON state that goes with the tensors, and the random sta
storage.py                 Bytes of a rank: fragments to one large file and an index, and rect
"""
