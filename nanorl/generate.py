"""Ask a trained model: `python -m nanorl.generate runs/grpo-1 "3+4*2-5*7+1=" --samples 4`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nanorl import checkpoint
from nanorl.errors import RunError
from nanorl.options import checking_options, choose, command_line
from nanorl.sampler import Sampler
from nanorl.tasks import TASKS


@dataclass
class Config:
    """Options of nanorl.generate."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run."""
    prompt: Annotated[str, tyro.conf.Positional]
    """What the model is to answer."""
    samples: int = 1
    """Responses."""
    temperature: float = 1.0
    """Of sampling."""
    greedy: bool = False
    """Take the likeliest token instead of sampling."""
    seed: int = 0
    """Of the samples."""


def main(config: Config) -> None:
    newest = checkpoint.latest(config.run / "checkpoint")
    if newest is None:
        started = (config.run / "config.json").exists()
        mend = "its warm start was not finished: resume it" if started else "give the folder of a run, runs/grpo-1 say"
        raise RunError(f"{config.run} holds no checkpoint: {mend}")
    task = choose("task", json.loads((config.run / "config.json").read_text())["options"]["task"], TASKS)()
    with checking_options():
        rollout = Sampler(checkpoint.load_model(newest)).generate(
            [task.tokenizer.encode_prompt(config.prompt)],
            samples_per_prompt=config.samples,
            max_new_tokens=task.max_new_tokens,
            stop_ids=[task.tokenizer.eos_id],
            temperature=config.temperature,
            greedy=config.greedy,
            seed=config.seed,
        )
    for text, finish in zip(rollout.texts(task.tokenizer), rollout.finish, strict=True):
        print(text if finish == "stop" else f"{text} ... (cut off)")


if __name__ == "__main__":
    command_line(Config, __doc__, main)
