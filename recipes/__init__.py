"""WHAT to train: recipes, config group options, and the schema that checks them.

check.py                   From a plain container to a frozen Recipe: every knob's name, type
compose.py                 Composes one recipe and its config group options into the frozen Recipe
faults.py                  Knobs of what a run survives by itself, and of who is told
rules.py                   Rules between knobs that need no layout: each a pure function of a
schema.py                  Every knob of a recipe: name, type, default, unit, meaning and lega
"""
