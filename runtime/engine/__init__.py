"""DeepSpeed's engines behind one small interface.

batches.py           Moves micro-batches to the device, and gathers small arrays of all ranks
build_engine.py      Builds the engine of a recipe on one rank
builds.py            Folder and locks of the extensions that torch compiles
communication.py     Counts what this rank sends and receives, by kind of collective
deepspeed_import.py  Imports DeepSpeed without the parts that are not used here
engine.py            The DeepSpeed engine behind the interface that the loop uses
initial_weights.py   Writes the initial weights that a rank holds
learning_rate.py     The learning rate of every step
memory.py            Peak memory of this rank
ops.py               Builds DeepSpeed's operators once on a host, before ranks wait for them
optimizer.py         The parameter groups, and the torch optimizer that DeepSpeed wraps
pipeline_engine.py   DeepSpeed's pipeline engine behind the same interface
rank_part.py         Builds one rank's part of a run without its other ranks and without memory
update_gate.py       Lets an update move the weights, or not: one answer for all ranks
"""
