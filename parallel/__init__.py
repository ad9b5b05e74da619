"""How ranks share the decoder: layouts, shards, collectives, pipeline stages.

collectives.py             The collectives of cut modules, in the form that a compiled block m
communication_volume.py    What the ranks of a layout say to each other in one step, as closed
layout.py                  Which rank does what: the axes of ranks, their sizes, and which com
legal.py                   Which layouts are legal, as data and rules, and what to do about on
mesh.py                    The groups of ranks behind the axes of a layout, made once per proc
pipeline.py                The decoder as pipeline stages: the same blocks as DeepSpeed layer
sharded_modules.py         Modules of the decoder that work on a part, and what they say to th
stages.py                  Which decoder blocks each pipeline stage holds: balanced by cost, o
tensor.py                  Cuts the decoder over ranks from outside: which module and which we
"""
