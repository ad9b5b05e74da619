"""The record that rank 0 writes: metrics, events, TensorBoard, the console.

console.py                 the progress display: one live line in a terminal, plain lines in a pipe
event_files.py             TensorBoard's event files: series, charts, texts, hyper-parameters
long_step.py               shows where a step is that takes longer than ten seconds
metrics.py                 metrics.jsonl, the other line files, and the summary of a run
rank0_record.py            reads the device scalars of a finished step and records everything
held_out_loss.py           validation loss and bits per byte, pooled and for each source
wandb_mirror.py            Weights & Biases as a mirror of TensorBoard's event files
"""
