"""INSIDE the training process.

resolve.py                 Everything that follows from a recipe, a number of ranks and the ba
saving.py                  When a run saves, and what; and what the ranks tell each other befo
"""
