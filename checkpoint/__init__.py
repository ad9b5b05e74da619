"""Layout-free checkpoints: written in pieces by whoever owns them, read in any other cut."""
