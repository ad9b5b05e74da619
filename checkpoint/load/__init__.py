"""Loading: which checkpoint, what may differ from it, how it is read.

allowed_changes.py         Compares the recipe of a checkpoint with that of now
choosing.py                Which checkpoints exist, which are whole, which one is resumed from
hf_check.py                Compares the decoder with Transformers' model: logits, rotary frequencies
hf_folder.py               Reads a Hugging Face folder through the family's Transformers class
outside_weights.py         Weights of step 0 that `init_from` names
rank_views.py              Tells damage from files that only some ranks or hosts can see
restoring.py               Reads a checkpoint into the pieces that each rank owns
run_tokenizer.py           Finds the tokenizer that a run was trained with; no torch
weight_rows.py             Weights that are read by rows, and those of a run's checkpoint
"""
