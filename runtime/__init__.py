"""The runtime: engine, DeepSpeed JSON, health, monitoring, logs and processes of a run.

resolve.py       Recipe, ranks and schedule -> layout, DeepSpeed JSON, length, warnings
same_recipe.py   Refuses a run whose ranks have different recipes
branching.py     Makes a new run from a checkpoint of another run
run.py           One run as one rank holds it from its start to its end
starting.py      Steps of a start: weights, segment, record, banner
telemetry.py     Everything that observes the loop, behind one object
saving.py        The schedule of saves, and what the ranks exchange before each save
save_writers.py  The two ways in which a save is written: in the step, or in a thread
saved_state.py   The state that a checkpoint holds besides weights and optimizer

Rooms: engine/ ds_config/ monitor/ health/ log/ process/
"""
