"""How ranks share the decoder: layouts, shards, collectives, pipeline stages.

collectives.py             Collectives that a compiled block may contain, started and waited for
communication_volume.py    Bytes that one step of a layout sends, as formulas
layout.py                  Layouts: sizes of the axes, and each rank's place on them
legal.py                   Rules for legal layouts, and the nearest legal ones
mesh.py                    Process groups of the axes, and this rank's place
pipeline.py                The decoder as DeepSpeed pipeline stages
sharded_modules.py         Modules of the decoder that compute one shard
stages.py                  Decoder blocks of each pipeline stage, balanced by cost
tensor.py                  Tables of what is sharded, and their use on a decoder
"""
