"""Checkpoints are whole or absent, and give back every bit."""

import io
import os
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save as safetensors_bytes

from nanorl import checkpoint
from nanorl.errors import RunError
from nanorl.model import GPT, GPTConfig
from nanorl.optimizers import Optimizers


class Killed(BaseException):
    """Like a kill, nobody catches it."""


def small_model(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=5, width=4, layers=1, heads=1, max_context=8))


def save(folder, step: int, seed: int | None = None):
    """A checkpoint whose contents tell which one it is."""
    return checkpoint.save(folder, step, {"policy": small_model(step if seed is None else seed)}, {"step": step})


def assert_whole(path, step: int):
    """The checkpoint that `save` wrote after `step` steps, with nothing missing."""
    assert path.name == f"step_{step:06d}"
    model = small_model(seed=999)
    assert checkpoint.load(path, {"policy": model}) == {"step": step}
    for found, written in zip(model.parameters(), small_model(step).parameters(), strict=True):
        assert torch.equal(found, written)


def partial_folders(folder):
    return [path for path in folder.iterdir() if path.name.startswith(".partial")]


def test_a_checkpoint_gives_back_every_bit_of_models_moments_and_counters(tmp_path):
    model, reference = small_model(0), small_model(1)
    optimizers = Optimizers(model, 0.01)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizers.step()
    training = {"optimizers": optimizers.state_dict(), "skipped": 2, "results": {"eval_before": {"accuracy": 0.1}}}
    path = checkpoint.save(tmp_path, 3, {"policy": model, "reference": reference}, training)

    other, other_reference = small_model(2), small_model(3)
    loaded = checkpoint.load(path, {"policy": other, "reference": other_reference})
    other_optimizers = Optimizers(other, 0.01)
    other_optimizers.load_state_dict(loaded["optimizers"])
    assert (loaded["skipped"], loaded["results"]) == (2, {"eval_before": {"accuracy": 0.1}})
    for a, b in ((model, other), (reference, other_reference)):
        assert all(torch.equal(a.state_dict()[name], value) for name, value in b.state_dict().items())
    states = (each.state_dict()["parts"] for each in (optimizers, other_optimizers))
    for mine, theirs in zip(*states, strict=True):
        assert mine["state"].keys() == theirs["state"].keys() and mine["state"]
        for parameter, moments in mine["state"].items():
            assert all(torch.equal(value, theirs["state"][parameter][name]) for name, value in moments.items())


def test_trap_f1_random_generators_go_on_where_they_were(tmp_path):
    def draw():
        return [random.random(), random.gauss(0, 1), *np.random.rand(3), *np.random.randn(1), *torch.rand(3).tolist()]

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()  # an odd number of normal draws: both generators hold the second of a pair back
    path = checkpoint.save(tmp_path, 1, {}, {"random": checkpoint.random_state()})
    expected = draw()
    random.seed(4), np.random.seed(5), torch.manual_seed(6)
    assert draw() != expected
    checkpoint.set_random_state(checkpoint.load(path, {})["random"])
    assert draw() == expected


def half_of(content: bytes, path) -> None:
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
    raise OSError("No space left on device")


def half_weights(tensors, path):
    half_of(safetensors_bytes(tensors), path)


def half_training(value, path):
    buffer = io.BytesIO()
    pickle_whole(value, buffer)
    half_of(buffer.getvalue(), path)


pickle_whole = torch.save


@pytest.mark.parametrize(
    ("writer", "failing"), [((checkpoint, "save_file"), half_weights), ((torch, "save"), half_training)]
)
def test_trap_f1_a_writer_that_fails_after_half_the_bytes_leaves_the_checkpoint_before_it(
    tmp_path, monkeypatch, writer, failing
):
    save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(*writer, failing)
        with pytest.raises(OSError, match="No space"):
            save(tmp_path, 2)
    (partial,) = partial_folders(tmp_path)
    assert any(file.stat().st_size for file in partial.iterdir())
    assert_whole(checkpoint.latest(tmp_path), 1)
    save(tmp_path, 2)
    assert_whole(checkpoint.latest(tmp_path), 2)
    assert not partial_folders(tmp_path)


OPERATIONS = [
    (checkpoint, "save_file"),
    (torch, "save"),
    (checkpoint, "sync"),
    (os, "rename"),
    (shutil, "rmtree"),
]


def dying_at(moment: int, monkeypatch, *, after: bool):
    """From here on the writer dies at its `moment`-th operation on the disk, just before it or just after it."""
    done = []

    def wrap(operation):
        def wrapped(*arguments, **options):
            done.append(operation)
            if len(done) == moment and not after:
                raise Killed
            result = operation(*arguments, **options)
            if len(done) == moment:
                raise Killed
            return result

        return wrapped

    for module, name in OPERATIONS:
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))
    return done


@pytest.mark.parametrize("after", [False, True])
def test_trap_f1_wherever_a_writer_is_killed_the_newest_checkpoint_is_whole(tmp_path, monkeypatch, after):
    survivors = []
    for moment in range(1, 50):
        folder = tmp_path / str(moment)
        for step in (1, 2):
            save(folder, step)
        with monkeypatch.context() as patched:
            done = dying_at(moment, patched, after=after)
            try:
                save(folder, 3)
            except Killed:
                pass
            else:
                break  # the writer had fewer operations than that
        newest = checkpoint.latest(folder)
        survivors.append(int(newest.name[-1]))
        assert_whole(newest, survivors[-1])
        save(folder, 4)  # the run that is resumed cleans up
        assert_whole(checkpoint.latest(folder), 4)
        assert not partial_folders(folder)
    # weights, counters, four syncs and the renaming before the new one counts; the folder's sync and removal after it
    assert survivors == ([2] * 6 + [3] * 3 if after else [2] * 7 + [3] * 2)
    assert len(done) == 9


def test_every_file_is_on_the_disk_before_the_checkpoint_counts(tmp_path, monkeypatch):
    synced = []
    rename = os.rename

    def check_then_rename(partial, final):
        assert {path.name for path in partial.iterdir()} == {"policy.safetensors", "policy.json", "training.pt"}
        assert set(synced) == {partial, *partial.iterdir()}
        rename(partial, final)

    monkeypatch.setattr(checkpoint, "sync", synced.append)
    monkeypatch.setattr(os, "rename", check_then_rename)
    save(tmp_path, 1)
    assert synced[-1] == tmp_path


def test_a_partial_folder_is_never_the_latest_and_the_next_save_removes_it_and_nothing_else(tmp_path):
    save(tmp_path, 5)
    (tmp_path / ".partial_step_000009").mkdir()
    (tmp_path / ".partial_step_000009" / "policy.safetensors").write_bytes(b"half")
    (tmp_path / ".partial_damaged_step_000007").mkdir()
    (tmp_path / ".partial_notes.txt").write_text("of the user: a reward model is written into the folder --out names")
    assert_whole(checkpoint.latest(tmp_path), 5)
    save(tmp_path, 10)
    assert partial_folders(tmp_path) == [tmp_path / ".partial_notes.txt"]


@pytest.mark.parametrize(
    ("writer", "error"),
    [("save_file", SafetensorError("No space left")), ("torch.save", RuntimeError("unexpected pos"))],
)
def test_a_full_disk_is_a_message_and_the_checkpoint_before_it_stays(writer, error, tmp_path, monkeypatch):
    def full(*_):
        raise error

    save(tmp_path, 5)
    with monkeypatch.context() as patched, pytest.raises(RunError, match=r"step_000006 could not be written: .*disk"):
        patched.setattr(f"nanorl.checkpoint.{writer}", full)
        save(tmp_path, 6)
    assert_whole(checkpoint.latest(tmp_path), 5)


def test_the_newest_two_checkpoints_are_kept_and_the_latest_is_the_one_with_most_steps(tmp_path):
    for step in (0, 9, 10, 99, 100, 1000):
        save(tmp_path, step)
        assert_whole(checkpoint.latest(tmp_path), step)
        assert checkpoint.steps_done(tmp_path) == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000", "step_000100", "step_001000"]


def test_without_a_checkpoint_there_is_no_latest(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "absent") is None
    assert checkpoint.steps_done(tmp_path / "absent") == 0


def test_saving_a_step_again_leaves_the_checkpoint_that_is_there(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, seed=7)
    assert_whole(checkpoint.latest(tmp_path), 1)


def test_loading_a_checkpoint_runs_no_code_hidden_in_it(tmp_path):
    class Hidden:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = checkpoint.save(tmp_path / "checkpoint", 1, {}, {"step": Hidden()})
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        checkpoint.load(path, {})
    assert not (tmp_path / "ran").exists()


def test_a_model_of_a_checkpoint_can_be_loaded_by_itself(tmp_path):
    model = small_model(4)
    path = checkpoint.save(tmp_path, 1, {"policy": model}, {})
    loaded = checkpoint.load_model(path)
    assert loaded.config == model.config
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
