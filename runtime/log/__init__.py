"""What rank 0 writes down: metrics, TensorBoard, the console.

console.py                 What a person sees while the run goes on: one line that stays in pl
event_files.py             TensorBoard event files of one segment of a run, and the pages that
metrics.py                 The record of a run, written by one rank, and the numbers drawn fro
rank0_record.py            What rank 0 keeps of a run while it trains: metrics, events, ledger
wandb_mirror.py            Weights & Biases as a mirror of the event files, never a second sou
"""
