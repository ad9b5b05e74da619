"""Rules between knobs that need no layout; each is a pure function of a few knobs.

Rule: a function returns None or one line with the values, the rule and the way out. It runs only
where all its knobs are legal by themselves, so it never sees a missing or mistyped value.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

from base.values import read_steps
from recipes.schema import batch_ramp

# A thousand times the largest published batches; the indices of so many still fit into memory.
MOST_SEQUENCES = 2**22


def _one_length(steps, tokens) -> str | None:
    if steps is None and tokens is None:
        return "the run has no length; give steps=N, tokens=N or tokens=chinchilla"
    if steps is not None and tokens is not None:
        return (
            f"steps={steps} and tokens={tokens} both set the length of the run; remove one"
            " (steps=null or tokens=null)"
        )
    return None


def _warmup_fits(warmup, steps) -> str | None:
    if steps is not None and isinstance(warmup, int) and warmup > steps:
        return (
            f"warmup={warmup} steps is longer than the run, steps={steps}; give at most {steps},"
            " or a fraction such as 0.01"
        )
    return None


def _decay_fits(schedule, decay, warmup, steps) -> str | None:
    if schedule != "wsd":
        return None
    share = warmup if isinstance(warmup, float) else warmup / steps if steps else 0
    if share + decay > 1:
        return (
            f"warmup={warmup} and optim.decay={decay} together are more than the run; lower one"
            f" of them (optim.decay at most {1 - share:.4g})"
        )
    return None


def _decay_leaves_weights(lr, weight_decay) -> str | None:
    if lr * weight_decay < 1:
        return None
    return (
        f"optim.lr={lr:g} x optim.weight_decay={weight_decay:g} is {lr * weight_decay:g}: a step"
        " would take away whole weights and more; lower one of them (their product is usually below"
        " 0.001)"
    )


def _batch_has_an_end(batch_tokens, seq_len) -> str | None:
    most = max(tokens for _, tokens in batch_ramp(batch_tokens))
    if most // seq_len <= MOST_SEQUENCES:
        return None
    return (
        f"batch_tokens={most} is {most // seq_len} sequences of seq_len={seq_len} in one step; at"
        f" most {MOST_SEQUENCES}, so at most {MOST_SEQUENCES * seq_len} tokens"
    )


def _heads(hidden, heads, head_dim) -> str | None:
    if head_dim is None and hidden % heads:
        return (
            f"model.hidden_size={hidden} is not a multiple of model.num_attention_heads={heads};"
            f" nearest: {hidden // heads * heads or heads} or {(hidden // heads + 1) * heads},"
            " or set model.head_dim"
        )
    width = head_dim or hidden // heads
    if width % 2:
        return (
            f"one head is {width} wide (model.head_dim, or hidden_size {hidden} /"
            f" num_attention_heads {heads}): rotary embeddings turn pairs, so it must be even"
        )
    return None


def _rope(kind, factor, low, high, original) -> str | None:
    values = {
        "rope_factor": (factor, 1.0, ("linear", "llama3")),
        "rope_low_freq_factor": (low, 1.0, ("llama3",)),
        "rope_high_freq_factor": (high, 4.0, ("llama3",)),
        "rope_original_max_position_embeddings": (original, 8192, ("llama3",)),
    }
    for name, (value, default, kinds) in values.items():
        if kind not in kinds and value != default:
            return (
                f"model.{name}={value} is not read with model.rope_type={kind}: set"
                f" model.rope_type={' or '.join(kinds)}, or leave it out"
            )
    if kind == "llama3" and low >= high:
        return (
            f"model.rope_low_freq_factor={low} is not below model.rope_high_freq_factor={high}:"
            " Llama 3.1 has 1 and 4"
        )
    return None


def _kv_heads(heads, kv_heads) -> str | None:
    if heads % kv_heads == 0:
        return None
    legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    return (
        f"model.num_key_value_heads={kv_heads} does not divide model.num_attention_heads={heads};"
        f" legal: {legal}"
    )


def _window(window, seq_len) -> str | None:
    if window is None or window % seq_len == 0:
        return None
    below = window // seq_len * seq_len
    above = below + seq_len
    return (
        f"data.window_tokens={window} is not a multiple of seq_len={seq_len};"
        f" nearest: {f'{below} or {above}' if below else above}"
    )


def _seq_len_warmup(warmup, seq_len) -> str | None:
    if warmup is None:
        return None
    lengths = [length for _, length in warmup]
    uneven = [length for length in lengths if seq_len % length]
    if uneven:
        parts = [n for n in range(2, 65) if seq_len % n == 0][:8]
        legal = f"; legal: {', '.join(str(seq_len // n) for n in reversed(parts))}" if parts else ""
        return (
            f"seq_len_warmup has the length {uneven[0]}, which does not divide seq_len={seq_len}:"
            f" sequences are cut into equal parts{legal}"
        )
    if any(low >= high for low, high in pairwise(lengths)):
        return f"seq_len_warmup has the lengths {lengths}; those of a warm-up increase"
    if lengths[-1] != seq_len:
        return (
            f"seq_len_warmup ends at {lengths[-1]} tokens, and seq_len={seq_len} would never be"
            f" reached: add [STEP, {seq_len}], or lower seq_len"
        )
    return None


def _built_in_corpora(sources) -> str | None:
    """A corpus that is built inside the repository must be in corpora/, which git ignores."""
    for uid, source in sources.items():
        path = Path(os.path.normpath(source.corpus))
        if source.build and not path.is_absolute() and path.parts[:1] != ("corpora",):
            return (
                f"data.sources.{uid}.corpus={source.corpus!r} with build={source.build}: it would"
                f" be built outside corpora/; use corpora/{path.name or uid}, or an absolute path"
            )
        if source.build and len(path.parts) < 2:
            return (
                f"data.sources.{uid}.corpus={source.corpus!r} with build={source.build}: it needs a"
                f" folder of its own, such as corpora/{uid}"
            )
    return None


def _sources(sources) -> str | None:
    if not sources:
        return "data.sources is empty; choose data=sotu, or set data.sources.NAME.corpus=FOLDER"
    for step in sorted({first for source in sources.values() for first, _ in source.stages()}):
        if all(source.weight_at(step) == 0 for source in sources.values()):
            when = f" from data step {step} on" if step else ""
            return (
                f"data.sources: every weight is 0{when}; give at least one source a weight above 0"
            )
    return None


def _profile(profile, steps, stop_after) -> str | None:
    if profile is None:
        return None
    try:
        wanted = read_steps(profile)
    except ValueError as error:
        return f"log.profile={profile!r} {error}"
    end = min(steps or wanted[-1], stop_after or wanted[-1])
    if wanted[-1] > end:
        return (
            f"log.profile={profile} goes past the last step, {end}; end it at {end + 1} or before"
            if wanted[0] <= end
            else f"log.profile={profile} begins after the last step, {end}; choose earlier steps"
        )
    return None


def _masked_sources(sources, mask) -> str | None:
    unknown = sorted({entry["source"] for entry in mask} - set(sources))
    if not unknown:
        return None
    return (
        f"data.skip.mask names the source {unknown[0]!r}, which data.sources does not have; there"
        f" are: {', '.join(sources)}"
    )


def _tolerance(tolerant, window) -> str | None:
    if tolerant <= window:
        return None
    return (
        f"health.tolerant={tolerant} is more than health.window={window}, which is all that is"
        " remembered, so nothing would ever be an outlier; lower it, or set health.outliers=off"
    )


def _stop_is_reached(stop_after, steps) -> str | None:
    if stop_after is not None and steps is not None and stop_after > steps:
        return f"stop_after={stop_after} is past the end of the run, steps={steps}: no effect"
    return None


def _whole_length_is_reached(warmup, steps) -> str | None:
    if warmup is None or steps is None or warmup[-1][0] < steps:
        return None
    return (
        f"seq_len_warmup reaches seq_len at data step {warmup[-1][0]}, and the run ends after"
        f" steps={steps}: its last positions are never trained"
    )


def _recompute(recompute, compiles) -> str | None:
    if not re.fullmatch(r"none|selective|full|every-[1-9]\d*", str(recompute)):
        return (
            f"recompute={recompute} is not none, selective, full or every-K (every-2: every second"
            " block)"
        )
    if recompute == "selective" and compiles:
        return (
            "recompute=selective with compile=true: a compiled block already runs again what is"
            " cheap; use recompute=none, full or every-K"
        )
    return None


def _minutes_are_read(interval, minutes) -> str | None:
    if interval != "auto" and minutes is not None:
        return (
            f"checkpoint.minutes={minutes} has no effect with checkpoint.interval={interval};"
            " set checkpoint.interval=auto, or remove one of them"
        )
    return None


def _ramp_is_reached(batch_tokens, steps) -> str | None:
    late = [step for step, _ in batch_ramp(batch_tokens) if steps is not None and step >= steps]
    if not late:
        return None
    return f"batch_tokens has a piece from step {late[0]} on; the run ends before, steps={steps}"


def _auto_keeps(interval, keep_every) -> str | None:
    if interval == "auto" and keep_every > 1:
        return (
            f"checkpoint.keep_every={keep_every}: with checkpoint.interval=auto few saves fall on a"
            " multiple of it"
        )
    return None


RULES = (
    (("steps", "tokens"), _one_length),
    (("warmup", "steps"), _warmup_fits),
    (("optim.schedule", "optim.decay", "warmup", "steps"), _decay_fits),
    (("optim.lr", "optim.weight_decay"), _decay_leaves_weights),
    (("batch_tokens", "seq_len"), _batch_has_an_end),
    (("model.hidden_size", "model.num_attention_heads", "model.head_dim"), _heads),
    (("model.num_attention_heads", "model.num_key_value_heads"), _kv_heads),
    (
        (
            "model.rope_type",
            "model.rope_factor",
            "model.rope_low_freq_factor",
            "model.rope_high_freq_factor",
            "model.rope_original_max_position_embeddings",
        ),
        _rope,
    ),
    (("data.window_tokens", "seq_len"), _window),
    (("seq_len_warmup", "seq_len"), _seq_len_warmup),
    (("data.sources",), _sources),
    (("recompute", "compile"), _recompute),
    (("data.sources",), _built_in_corpora),
    (("log.profile", "steps", "stop_after"), _profile),
    (("data.sources", "data.skip.mask"), _masked_sources),
    (("health.tolerant", "health.window"), _tolerance),
    (("checkpoint.interval", "checkpoint.minutes"), _minutes_are_read),
)
WARNINGS = (
    (("stop_after", "steps"), _stop_is_reached),
    (("seq_len_warmup", "steps"), _whole_length_is_reached),
    (("batch_tokens", "steps"), _ramp_is_reached),
    (("checkpoint.interval", "checkpoint.keep_every"), _auto_keeps),
)
