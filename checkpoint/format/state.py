"""The small JSON state that goes with the tensors, and the random states of one rank.

The state of the data is one integer of position plus fingerprints. The learning rate is a function
of the step, and weights and moments are tensors, so neither is stored here. Rule: a state that
cannot be read in full is an error; no default ever takes the place of a missing value. Units:
steps, tokens.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from checkpoint.format.blocks import Damaged

# What a state must contain for a run to go on from it: field -> required keys.
NEEDED = {
    "recipe": ("model", "data", "optim", "seq_len"),
    "data": ("order_version", "corpora", "window_tokens"),
    "health": ("skips_in_a_row", "skipped_steps"),
}
# Fields that older checkpoints lack.
LATER = {"saving"}


@dataclass(frozen=True)
class RunState:
    """State of a run after update `step`."""

    step: int
    tokens: int  # tokens trained on so far
    optimizer_step: int  # updates that changed the weights; less than `step` after skipped ones
    seed: int
    recipe: dict[str, Any]  # resolved, nested
    # From data.stream.stream: position, order version, fingerprints of corpora.
    data: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    segment: int = 0  # of the run's history
    health: dict[str, Any] = field(default_factory=dict)  # statistics behind the verdicts
    saving: dict[str, Any] = field(default_factory=dict)  # checkpoint.interval=auto: the next save
    recipe_hash: str = ""  # computed here

    def __post_init__(self) -> None:
        expected = fingerprint(self.recipe)
        if self.recipe_hash not in ("", expected):
            raise Damaged(f"state: recipe_hash {self.recipe_hash}, but the recipe has {expected}")
        object.__setattr__(self, "recipe_hash", expected)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        """Invert `as_dict`. Raises Damaged for missing, unknown or wrong fields."""
        names = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or set(values) | LATER != names:
            got = sorted(set(values) ^ names) if isinstance(values, dict) else type(values).__name__
            raise Damaged(f"state: missing or unknown fields {got}")
        for name in ("step", "tokens", "optimizer_step", "seed", "segment"):
            if type(values[name]) is not int or values[name] < 0:
                raise Damaged(f"state: {name}={values[name]!r} is not a count")
        for name, keys in NEEDED.items():
            if not isinstance(values[name], dict) or not values[name].keys() >= set(keys):
                raise Damaged(f"state: {name} must have {', '.join(keys)}")
        return cls(**values)


def fingerprint(value: Any) -> str:
    """Return a hash of plain values that does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def random_states(device: Any = None) -> dict[str, Any]:
    """Return the states of this rank's global random generators (torch, numpy, Python, and the CUDA
    `device`) as JSON.
    """
    import torch  # inside, because the launcher uses this file and imports no torch

    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "torch": _encode(torch.get_rng_state().numpy()),
        "numpy": [kind, _encode(keys), position, has_gauss, float(cached).hex()],
        "python": [version, _encode(np.array(words, np.uint64)), gauss],
    }
    if device is not None and device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device).numpy())
    return states


def restore_random_states(states: dict[str, Any], device: Any = None) -> None:
    """Restore what `random_states` returned. Raises Damaged before any generator is changed."""
    import torch

    # Decode and try every state on a generator of its own.

    try:
        kind, keys, position, has_gauss, cached = states["numpy"]
        version, words, gauss = states["python"]
        numpy_state = (kind, _decode(keys, np.uint32), position, has_gauss, float.fromhex(cached))
        python_state = (version, tuple(_decode(words, np.uint64).tolist()), gauss)
        torch_state = torch.from_numpy(_decode(states["torch"], np.uint8))
        np.random.RandomState().set_state(numpy_state)
        random.Random().setstate(python_state)
        torch.Generator().set_state(torch_state)
        cuda_state = states.get("cuda")
        if cuda_state is not None:
            cuda_state = torch.from_numpy(_decode(cuda_state, np.uint8))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise Damaged(f"random state: {type(error).__name__}: {error}") from None
    # Set the global generators.
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    torch.set_rng_state(torch_state)
    if cuda_state is not None and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(cuda_state, device)


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _decode(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype)
