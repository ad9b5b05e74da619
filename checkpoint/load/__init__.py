"""Loading: which checkpoint, what may differ from it, how it is read.

allowed_changes.py         Compares the recipe of a checkpoint with that of now
choosing.py                Which checkpoints exist, which are whole, which one is resumed from
outside_weights.py         Weights of step 0 that `init_from` names
restoring.py               Reads a checkpoint into the pieces that each rank owns
weight_rows.py             Reads weights by rows, from a Hugging Face folder or another run
"""
