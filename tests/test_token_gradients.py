"""The push on each token under each loss: by hand, from a stored batch, and from the checkpoints of a real run."""

import json
import math
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import train_grpo
from nanorl import checkpoint, report, token_gradients
from nanorl.algorithms import ALGORITHMS, Algorithm
from nanorl.errors import RunError
from nanorl.losses.aggregate import constant_mean
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.tasks.chain import ChainArithmetic
from nanorl.token_gradients import Batch, Config, draw, main, pushes, read, sample, tables

Z = 0.5 / (math.sqrt(0.5) + 1e-4)  # the z-score of rewards 1 and 0 in a group of two is +Z and -Z


def batch(ratios: list[list[float]], rewards: list[float], groups: list[int] | None = None) -> Batch:
    """Responses of the given ratios pi / pi_old; shorter ones are padded."""
    longest = max(map(len, ratios))
    padding = [longest - len(row) for row in ratios]
    return Batch(
        texts=[["abcdefgh"[t] for t in range(len(row))] for row in ratios],
        logprobs=[[-1 + math.log(r) for r in row] + [0.0] * n for row, n in zip(ratios, padding, strict=True)],
        old_logprobs=[[-1.0] * len(row) + [0.0] * n for row, n in zip(ratios, padding, strict=True)],
        mask=[[True] * len(row) + [False] * n for row, n in zip(ratios, padding, strict=True)],
        rewards=rewards,
        groups=groups or [0] * len(ratios),
        max_length=10,
        origin="made by hand",
    )


# ---- by hand


def test_with_ratios_of_1_grpo_pushes_each_token_by_the_advantage_over_responses_and_length():
    push, clipped, advantages = pushes(batch([[1, 1, 1, 1], [1, 1]], [1, 0]), ALGORITHMS["grpo"])
    assert advantages.tolist() == pytest.approx([Z, -Z])
    assert push[0].tolist() == pytest.approx([Z / 2 / 4] * 4)
    assert push[1].tolist() == pytest.approx([-Z / 2 / 2] * 2 + [0, 0])
    assert not clipped.any()


def test_a_token_is_clipped_where_its_ratio_has_left_the_band_in_the_direction_of_its_advantage():
    push, clipped, _ = pushes(batch([[1.5, 0.5, 1.1], [1.5, 0.5, 1.1]], [1, 0]), ALGORITHMS["grpo"])
    assert clipped.tolist() == [[True, False, False], [False, True, False]]
    per_token = Z / 2 / 3
    assert push[0].tolist() == pytest.approx([0, 0.5 * per_token, 1.1 * per_token])
    assert push[1].tolist() == pytest.approx([-1.5 * per_token, 0, -1.1 * per_token])


def test_a_group_of_equal_rewards_is_not_pushed_and_not_clipped():
    push, clipped, _ = pushes(batch([[1.5], [0.5], [1.5], [0.5]], [1, 1, 1, 0], [0, 0, 1, 1]), ALGORITHMS["grpo"])
    assert push[:2].abs().max() == 0 and clipped[:, 0].tolist() == [False, False, True, True]


def test_advantages_and_the_longest_response_are_those_of_the_algorithm():
    def dr_grpo(logprobs, old_logprobs, advantages, mask, *, max_length, denominator=None):
        ratio = (logprobs - old_logprobs).exp()
        return constant_mean(-ratio * advantages[:, None], mask, max_length, denominator), {}

    row = Algorithm(dr_grpo, advantage_scale="none", mean_over="sequences")
    push, _, advantages = pushes(batch([[1, 1, 1, 1], [1, 1]], [1, 0]), row)
    assert advantages.tolist() == [0.5, -0.5]
    assert push.tolist() == [pytest.approx([0.5 / 2 / 10] * 4), pytest.approx([-0.5 / 2 / 10] * 2 + [0, 0])]


# ---- what is written


def test_the_tables_hold_every_token_once_and_the_sums_of_each_response():
    made = batch([[1.5, 1, 1], [1, 1]], [1, 0])
    made.texts[1] = ["|", "b", "what an environment said"]
    text = tables(made, {"grpo": pushes(made, ALGORITHMS["grpo"])})
    responses, tokens = (part.splitlines() for part in text.split("\n\n") if part.startswith("|"))
    cells = [[cell.strip() for cell in line.replace("\\|", "bar").split("|")[1:-1]] for line in responses]
    assert cells[2] == ["0", "1", "3", f"{2 * Z / 6:+.4f} (1 of 3 clipped)"] and cells[3] == [
        "1",
        "0",
        "2",
        f"{-Z / 2:+.4f}",
    ]
    cells = [[cell.strip() for cell in line.replace("\\|", "bar").split("|")[1:-1]] for line in tokens]
    assert cells[2:] == [
        ["0", "`a`", "1.5000", "clipped"],
        ["0", "`b`", "1.0000", f"{Z / 6:+.5f}"],
        ["0", "`c`", "1.0000", f"{Z / 6:+.5f}"],
        ["1", "`bar`", "1.0000", f"{-Z / 4:+.5f}"],
        ["1", "`b`", "1.0000", f"{-Z / 4:+.5f}"],
    ]


def test_the_picture_has_a_panel_a_loss_and_says_how_much_is_clipped(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(token_gradients, "save", lambda figure, path, caption: kept.append(figure) or path)
    made = batch([[1.5, 1, 1], [1]], [1, 0])
    found = pushes(made, ALGORITHMS["grpo"])
    nothing = (torch.zeros(2, 3), torch.tensor(made.mask), found[2])
    draw(made, {"grpo": found, "none": nothing, "again": found}, tmp_path / "picture.png", "caption")
    (figure,) = kept
    assert [axes.get_visible() for axes in figure.axes] == [True, True, True, False]
    assert "Tokens clipped: grpo 25%, none 100%, again 25%" in figure.get_suptitle()
    assert figure.axes[0].get_title() == f"grpo, largest push {Z / 2:.2g}"
    cells = figure.axes[0].images[0].get_array()
    assert cells.mask.tolist() == [[True, False, False], [False, True, True]]  # clipped, or beyond the end
    assert cells.compressed().tolist() == pytest.approx([Z / 6, Z / 6, -Z / 2])
    token_gradients.plt.close(figure)


def test_a_stored_batch_is_shown_under_an_own_loss_too(tmp_path, capsys):
    (tmp_path / "my_loss.py").write_text(
        "from nanorl.losses.aggregate import token_mean\n"
        "def my_loss(logprobs, old_logprobs, advantages, mask, *, denominator=None):\n"
        "    return token_mean(-advantages[:, None] * logprobs, mask, denominator), {}\n"
    )
    stored = tmp_path / "batch.json"
    stored.write_text(json.dumps(asdict(batch([[1, 1, 1], [1]], [1, 0]))))
    own = f"{tmp_path / 'my_loss.py'}:my_loss"
    found = main(Config(stored, losses=["grpo", own]))
    push, clipped, _ = found[own]
    assert push.tolist() == [pytest.approx([Z / 2] * 3), pytest.approx([-Z / 2, 0, 0])]  # by the 2 rows, as GRPO's is
    assert not clipped.any()
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")
    text, shown = (tmp_path / "batch.md").read_text(), capsys.readouterr().out
    assert text.startswith(shown.partition("\n\neach token:")[0]) and "`c`" in text and "`c`" not in shown


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"texts": [], "more": 1}'])
def test_what_is_no_batch_is_an_error(text, tmp_path):
    (tmp_path / "batch.json").write_text(text)
    with pytest.raises(RunError, match="neither the folder of a run nor a stored batch"):
        read(tmp_path / "batch.json")
    with pytest.raises(RunError, match="neither the folder of a run nor a stored batch"):
        read(tmp_path / "nowhere.json")
    with pytest.raises(RunError, match="--losses gropo is unknown"):
        main(Config(tmp_path / "batch.json", losses=["gropo"]))


# ---- from a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run with a checkpoint after each update, and a reward that differs within most groups."""
    out = tmp_path_factory.mktemp("runs") / "run"
    tiny = {"size": (16, 1, 2), "prompts": 4, "group_size": 6, "steps": 2, "eval_problems": 2}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChainArithmetic, "reward", lambda self, problem, text: zlib.crc32(text.encode()) % 2)
        patched.setattr(report, "draw_curves", lambda out: None)
        train_grpo.main(
            train_grpo.Config(
                out=str(out),
                **tiny,
                warm_start_steps=2,
                save_every=1,
                learning_rate=0.02,
                temperature=0.8,
                device="cpu",
            )
        )
        yield out


def test_a_batch_of_a_run_is_sampled_by_its_last_checkpoint_but_one_and_scored_by_its_last(run):
    made = sample(run, problems=2, seed=0)
    task, problems = ChainArithmetic(), ChainArithmetic().training_problems(token_gradients.TRIED, "token gradients 0")
    assert len(made.rewards) == 12 and made.groups[:6] == [made.groups[0]] * 6 != made.groups[6:]
    for rewards in (made.rewards[:6], made.rewards[6:]):
        assert len(set(rewards)) > 1
    ids = {task.tokenizer.token_bytes(i).decode(): i for i in range(task.tokenizer.vocab_size)}
    rollout = Rollout.from_responses(
        [task.tokenizer.encode_prompt(problems[group].prompt) for group in made.groups],
        [[ids[text] for text in texts] for texts in made.texts],
    )
    rollout.temperature = 0.8
    for step, found in ((1, made.old_logprobs), (2, made.logprobs)):
        policy = checkpoint.load_model(run / "checkpoint" / f"step_{step:06d}")
        torch.testing.assert_close(score(policy, rollout)[0], torch.tensor(found), rtol=0, atol=1e-5)
        again = Sampler(policy).generate(  # each sample depends on its number alone
            [rollout.prompts[0]],
            samples_per_prompt=6,
            sample_ids=range(6 * made.groups[0], 6 * made.groups[0] + 6),
            max_new_tokens=made.max_length,
            stop_ids=[task.tokenizer.eos_id],
            temperature=0.8,
            seed=0,
        )
        assert torch.equal(again.tokens, rollout.select(range(6)).tokens) == (step == 1)
    assert rollout.mask.tolist() == made.mask
    assert (torch.tensor(made.logprobs) - torch.tensor(made.old_logprobs)).abs().max() > 1e-3
    assert made.max_length == task.max_new_tokens
    assert made.origin == "run: sampled at step_000001, scored at step_000002"


def test_a_run_leaves_its_batch_so_that_it_can_be_shown_again(run):
    found = main(Config(run, losses=["grpo"], problems=2))
    stored = run / "token_gradients.json"
    assert read(stored) == sample(run, problems=2, seed=0)
    before = stored.with_suffix(".md").read_text()
    again = main(Config(stored, losses=["grpo"]))
    assert all(map(torch.equal, found["grpo"], again["grpo"]))
    assert stored.with_suffix(".md").read_text() == before and stored.with_suffix(".png").exists()


def test_too_many_problems_or_too_few_checkpoints_are_an_error(run, tmp_path):
    with pytest.raises(RunError, match=r"only \d+ of 64 groups have rewards that differ: ask for fewer --problems"):
        sample(run, problems=65, seed=0)
    with pytest.raises(RunError, match="holds 0 checkpoints of the two it takes"):
        sample(tmp_path, problems=1, seed=0)


def test_the_command_in_the_picture_draws_it_again(run, monkeypatch):
    kept = []
    monkeypatch.setattr(token_gradients, "draw", lambda batch, found, path, caption: kept.append(caption) or path)
    main(Config(Path(run), losses=["grpo"]))
    command = f"python -m nanorl.token_gradients {run / 'token_gradients.json'} --losses grpo"
    assert kept[0].endswith(f"Drawn by: {command}")
