"""Checkpoints that are whole or absent: written beside, synced to disk, then renamed into place.

    checkpoint/step_000040/policy.safetensors   weights of each model, by name
    checkpoint/step_000040/policy.json          and its shape
    checkpoint/step_000040/training.pt          optimizer moments, random number generators, counters
    checkpoint/step_000000                      the state before training, always kept: samples.html compares with it

A writer that is killed leaves a folder whose name starts with `.partial`, which nobody reads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from nanorl.errors import RunError
from nanorl.model import GPT, GPTConfig

KEPT = 2  # checkpoints: the newest and the one before it; and the first
FIRST = "step_000000"
PARTIAL = ".partial"


def save(folder: Path, step: int, models: dict[str, nn.Module], training: dict) -> Path:
    """Write the state after `step` steps; returns its folder. Older checkpoints but one, and but FIRST, are removed
    afterwards."""
    final = folder / f"step_{step:06d}"
    if not final.exists():  # else a resumed run stopped before its first new step: the same state
        write(final, models, training)
        for old in complete(folder)[:-KEPT]:
            if old.name != FIRST:
                shutil.rmtree(old)
    return final


def write(final: Path, models: dict[str, nn.Module], training: dict) -> None:
    """A folder with weights, shapes and `training`, all of it or nothing."""
    folder = final.parent
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{PARTIAL}_{final.name}"
    # By these names alone: a reward model is written into the folder that --out names, and that may hold other things.
    for stale in {found for name in ("step_*", "damaged_*", final.name) for found in folder.glob(f"{PARTIAL}_{name}")}:
        shutil.rmtree(stale)
    partial.mkdir()
    try:
        for name, model in models.items():
            weights = {key: value.contiguous() for key, value in model.state_dict().items()}
            save_file(weights, partial / f"{name}.safetensors")
            (partial / f"{name}.json").write_text(json.dumps(dataclasses.asdict(model.config)))
        torch.save(training, partial / "training.pt")
    except (SafetensorError, RuntimeError) as error:  # what the two libraries make of a full disk
        raise RunError(f"{final} could not be written: is the disk full? ({error})") from None
    for path in [*partial.iterdir(), partial]:
        sync(path)
    os.rename(partial, final)
    sync(folder)


def sync(path: Path) -> None:
    if os.name == "nt":  # Windows syncs no folders, and no file that is open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest last."""
    return sorted((path for path in folder.glob("step_*") if path.name[5:].isdecimal()), key=step_of)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    return max(complete(folder), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def steps_done(folder: Path) -> int:
    """Steps behind the newest complete checkpoint; 0 without one."""
    newest = latest(folder)
    return step_of(newest) if newest else 0


def load(checkpoint: Path, models: dict[str, nn.Module]) -> dict:
    """Fill `models` and return the training state that was saved beside them. Raises RunError if a file is damaged."""
    try:
        weights = {name: load_file(checkpoint / f"{name}.safetensors") for name in models}
        training = torch.load(checkpoint / "training.pt", map_location="cpu", weights_only=True)
        for name, model in models.items():
            model.load_state_dict(weights[name])
    except MemoryError:
        raise
    except Exception as error:  # of any kind: torch reads whatever it finds as a pickle
        raise RunError(f"{checkpoint} is damaged ({error!r})") from None
    return training


def load_model(checkpoint: Path, name: str = "policy", kind: type[GPT] = GPT) -> GPT:
    """A model of a checkpoint by itself, to be used."""
    try:
        model = kind(GPTConfig(**json.loads((checkpoint / f"{name}.json").read_text())))
        weights = load_file(checkpoint / f"{name}.safetensors")
        model.to(next(iter(weights.values()), torch.empty(0)).dtype).load_state_dict(weights)
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:  # RecursionError too
        raise RunError(f"{checkpoint} is damaged ({error})") from None
    return model


def random_state() -> dict:
    """Of Python's, NumPy's and torch's global generators, for rewards and tasks that use them."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict) -> None:
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
