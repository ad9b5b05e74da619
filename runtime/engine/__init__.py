"""DeepSpeed's engines behind one small interface.

batches.py                 Micro-batches on their way to the device, and small arrays on their
builds.py                  Where torch compiles extensions, and how a process waits for anothe
communication.py           Counts what this rank sends and receives: every collective of torch
engine.py                  The DeepSpeed engine behind the small interface that the loop uses
initial_weights.py         Writes the initial weights that a rank holds, drawing no more of th
learning_rate.py           The learning rate of every step
memory.py                  Peak memory of this rank since its process began
ops.py                     Builds DeepSpeed's operators once on a host, before ranks wait: `py
optimizer.py               Which parameters decay, and the torch optimizer that DeepSpeed wrap
pipeline_engine.py         The pipeline engine of DeepSpeed behind the interface of `runtime.e
update_gate.py             The gate between DeepSpeed and the optimizer that it wraps: closed,
"""
