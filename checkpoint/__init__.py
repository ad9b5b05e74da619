"""Checkpoints that any layout can load: what is on disk, how it is saved, how it is loaded.

format/                    The files of a checkpoint folder
save/                      All ranks write, rank 0 commits
load/                      A checkpoint is chosen, compared with the recipe, and read
comm.py                    How ranks exchange small values during a save or a load
export.py                  Writes a checkpoint as a Hugging Face folder
exported_tokenizer.py      Makes the tokenizer of an export agree with the training
fragments.py               Finds the pieces of weights and optimizer states that this rank owns
merging.py                 The average of several checkpoints, as a checkpoint
lineage.py                 Segments of a run: which steps and checkpoints belong to it now
"""
