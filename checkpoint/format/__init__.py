"""The files of a checkpoint folder. Nothing is pickled: JSON and raw tensor bytes only.

blocks.py                  Reads files block by block and compares each block with its digest
epochs.py                  Epochs: which attempt may write the run now
index.py                   The index of all stored pieces, and plans for reading them
index_file.py              Names of a rank's files, and its index as JSON; no torch
manifest.py                MANIFEST.json, which makes a folder a checkpoint; names of folders
rectangles.py              Pieces of tensors as rectangles: cutting, shifting, overlapping
state.py                   The JSON state of a run, and the random states of one rank
storage.py                 Writes tensors of a rank to its file, and reads pieces back
"""
