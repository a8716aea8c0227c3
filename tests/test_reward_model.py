"""The scalar head: where it reads, what it must not see, how it is trained, examined and kept."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nanorl import reward_model as rewarding
from nanorl.errors import RunError
from nanorl.model import GPTConfig
from nanorl.optimizers import Optimizers
from nanorl.preferences import Pair, batch_of
from nanorl.reward_model import RewardModel, correlation, critic_from, examine, from_option, train_reward_model
from nanorl.rollout import Rollout

EOS = 2
PROMPTS = [[5, EOS, 6], [9], [1, 3, 4, 5, 6, 7, 8], [EOS, EOS], [3, EOS, 19]]  # eos inside the prompts
RESPONSES = [[EOS], [4, 4, 4, 4, 4, 4, 4], [5, 1, EOS], [7], [6, EOS, 8, 9]]
FORMS = {"untied": {}, "tied": {"tied": True}, "llama": {"qk_norm": False}}
CONFIG = GPTConfig(20, width=16, layers=2, heads=2, max_context=24)


@pytest.fixture
def reward_model(tiny_gpt):
    """A reward model far from uniform, its gain and bias not those of a fresh one."""

    def build(dtype: torch.dtype = torch.float64, seed: int = 0, **form) -> RewardModel:
        model = RewardModel.from_policy(tiny_gpt(seed, dtype=dtype, **form))
        nn.init.normal_(model.score_weight, generator=torch.Generator().manual_seed(seed + 1))
        model.gain.fill_(1.7)
        model.bias.fill_(-0.4)
        return model

    return build


def given() -> Rollout:
    return Rollout.from_responses(PROMPTS, RESPONSES)


def padded(rollout: Rollout, pad: int, columns: int = 4) -> Rollout:
    """The same with more columns, all padding `pad`."""
    B, T = rollout.tokens.shape
    tokens, mask = torch.full((B, T + columns), pad), torch.zeros(B, T + columns, dtype=torch.bool)
    tokens[:, :T], mask[:, :T] = torch.where(rollout.mask, rollout.tokens, pad), rollout.mask
    return Rollout(rollout.prompts, tokens, mask, rollout.lengths, rollout.finish, rollout.groups)


@torch.no_grad()
def by_hand(model: RewardModel, prompt: list[int], response: list[int]) -> Tensor:
    """(T + 1,) the score behind the prompt and behind each token, by one forward pass over one unpadded row."""
    hidden = model(torch.tensor([prompt + response]))[0]  # (P + T, D)
    return 1.7 * (hidden @ model.score_weight[0])[len(prompt) - 1 :] - 0.4


# ---- where it reads


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_trap_d1_the_outcome_is_read_behind_the_last_token_alone_and_in_a_padded_batch(form, reward_model):
    model = reward_model(**form)
    expected = [by_hand(model, prompt, response)[-1] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    batch = model.outcomes(given())
    assert batch.shape == (5,)
    torch.testing.assert_close(batch, torch.stack(expected), rtol=0, atol=1e-10)
    for row in range(5):
        alone = model.outcomes(given().select([row]))
        torch.testing.assert_close(alone, batch[row : row + 1], rtol=0, atol=1e-10)
    assert batch.detach().unique().numel() == 5


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_trap_d1_whatever_ids_stand_in_the_padding_no_score_or_value_changes(dtype, close, reward_model):
    model = reward_model(dtype)
    outcomes, values = model.outcomes(given()), model.values(given())
    T = values.shape[1]
    for pad in (0, EOS, 19):
        wide = padded(given(), pad)
        torch.testing.assert_close(model.outcomes(wide), outcomes, rtol=0, atol=close)
        wide_values = model.values(wide)
        torch.testing.assert_close(wide_values[:, :T], values, rtol=0, atol=close)
        assert (wide_values[:, T:] == 0).all()


def test_trap_d1_the_stop_token_is_read_and_no_first_eos_is_looked_for(reward_model):
    """The trap's ids: [5, 2, 6, 2] with 2 as stop and as padding. The last real token is number 3, wherever the prompt
    ends."""
    model = reward_model()
    for prompt, response in (([5], [EOS, 6, EOS]), ([5, EOS], [6, EOS]), ([5, EOS, 6], [EOS])):
        wide = padded(Rollout.from_responses([prompt], [response]), EOS, columns=2)
        torch.testing.assert_close(model.outcomes(wide)[0], by_hand(model, [5, EOS, 6, EOS], [])[0], rtol=0, atol=1e-10)


def test_trap_d1_a_row_without_a_token_is_an_error_that_names_it(reward_model):
    model = reward_model()
    empty = Rollout.from_responses([[5], [5], [5]], [[1], [], [2]])
    masked = given()
    masked.mask[3] = False
    for rollout, row in ((empty, 1), (masked, 3)):
        with pytest.raises(ValueError, match=f"response {row} has no token that could be scored: leave it out"):
            model.outcomes(rollout)


def test_process_scores_stand_at_the_ends_of_steps_and_nowhere_else(reward_model):
    model, rollout = reward_model(), given()
    ends = torch.zeros_like(rollout.mask)
    ends[1, 1] = ends[1, 4] = ends[1, 6] = ends[4, 3] = True
    found = model.steps(rollout, ends)
    assert found.shape == rollout.tokens.shape and (found[~ends] == 0).all()
    for row in (1, 4):
        expected = by_hand(model, PROMPTS[row], RESPONSES[row])
        for t in ends[row].nonzero().flatten().tolist():
            assert found[row, t].item() == pytest.approx(expected[t + 1].item(), abs=1e-10)  # the token is read
    torch.testing.assert_close(found[1, 6], model.outcomes(rollout)[1])  # the last step's is the outcome's


# ---- the critic


def test_values_stand_before_each_token(reward_model):
    model = reward_model()
    values = model.values(given())
    assert values.shape == (5, 7)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = by_hand(model, prompt, response)
        torch.testing.assert_close(values[row, : len(response)], expected[:-1], rtol=0, atol=1e-10)
        assert (values[row, len(response) :] == 0).all()


def test_a_value_does_not_see_the_token_it_stands_before(reward_model):
    """Another token t changes no value at t or before it, and every one behind it."""
    model = reward_model()
    values = model.values(given())
    for t in range(7):
        changed = given()
        changed.tokens[1, t] = 11
        found = model.values(changed)
        assert torch.equal(found[1, : t + 1], values[1, : t + 1])
        assert ((found - values)[1, t + 1 :].abs() > 1e-8).all()
        assert torch.equal(found[[0, 2, 3, 4]], values[[0, 2, 3, 4]])


def test_the_critic_starts_as_the_reward_model_in_storage_of_its_own_and_learns(reward_model):
    model = reward_model().requires_grad_(False)
    critic = critic_from(model)
    torch.testing.assert_close(critic.scores(given()), model.scores(given()), rtol=0, atol=0)
    assert all(weight.requires_grad for weight in critic.parameters())
    assert not any(weight.requires_grad for weight in model.parameters())
    own = {weight.data_ptr() for weight in critic.state_dict().values()}
    assert not own & {weight.data_ptr() for weight in model.state_dict().values()}


# ---- from the policy


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_it_starts_from_the_policys_weights_in_storage_of_its_own_with_a_head_of_zeros(form, tiny_gpt):
    policy = tiny_gpt(**form)
    model = RewardModel.from_policy(policy)
    own = dict(model.named_parameters())
    for name, weight in policy.named_parameters():
        if name != "head_weight":
            assert torch.equal(own[name], weight) and own[name].data_ptr() != weight.data_ptr()
    assert set(own) == {name for name, _ in policy.named_parameters()} - {"head_weight"} | {"score_weight"}
    assert model.score_weight.shape == (1, 32) and (model.outcomes(given()) == 0).all()
    losses = []
    train_reward_model(model, pairs(), steps=1, seed=0, report=lambda step, loss: losses.append(loss))
    assert losses == pytest.approx([0.693147], abs=1e-6)


def pairs() -> list[Pair]:
    """Chosen ones hold a 7, rejected ones do not."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(40):
        a, b = (torch.randint(8, 20, (1 + (i + k) % 5,), generator=generator).tolist() for k in (0, 2))
        a[i % len(a)] = 7
        found.append(Pair([5, 6], [*a, EOS], [*b, EOS]))
    return found


# ---- training


def test_it_learns_which_response_is_better(tiny_gpt):
    model = RewardModel.from_policy(tiny_gpt(width=16, layers=1))
    steps = []
    how = {"steps": 40, "seed": 0, "batch": 16, "learning_rate": 0.02}
    train_reward_model(model, pairs(), **how, report=lambda step, loss: steps.append((step, loss)))
    assert [step for step, _ in steps] == list(range(40)) and steps[-1][1] < 0.2
    assert examine(model, pairs())["accuracy"] > 0.95


def test_training_it_is_a_function_of_pairs_and_seed(tiny_gpt):
    def trained(seed: int) -> Tensor:
        model = RewardModel.from_policy(tiny_gpt(width=16, layers=1))
        train_reward_model(model, pairs(), steps=3, seed=seed, batch=16)
        return model.outcomes(given()).detach()

    assert torch.equal(trained(0), trained(0)) and not torch.equal(trained(0), trained(1))


def test_its_learning_rate_rises_and_falls_to_zero(tiny_gpt, monkeypatch):
    rates, update = [], Optimizers.update

    def spy(self, loss, rate=1.0):
        rates.append(rate)
        return update(self, loss, rate)

    monkeypatch.setattr(Optimizers, "update", spy)
    train_reward_model(RewardModel.from_policy(tiny_gpt(width=16, layers=1)), pairs(), steps=20, seed=0)
    rising = [(step + 1) / 10 for step in range(9)]
    assert rates[:7] == pytest.approx(rising[:7]) and max(rates) == rates[6] and rates[-1] == pytest.approx(1 / 20)
    assert rates[7:] == pytest.approx([(20 - step) / 20 for step in range(7, 20)])


def test_fewer_pairs_than_a_batch_are_a_batch(tiny_gpt):
    train_reward_model(RewardModel.from_policy(tiny_gpt(width=16, layers=1)), pairs()[:3], steps=2, seed=0)


# ---- normalization


def normalized(raw: list[float], model: RewardModel | None = None) -> RewardModel:
    model = RewardModel(CONFIG) if model is None else model
    model.normalize(torch.tensor(raw))
    return model


def test_trap_d2_scores_get_mean_0_and_deviation_1_with_the_population_s_deviation():
    model = normalized([3.0, 5.0, 7.0])
    assert model.gain.item() == pytest.approx(0.612372, abs=1e-6)
    assert model.bias.item() == pytest.approx(-3.061862, abs=1e-6)
    scores = model.gain * torch.tensor([3.0, 5.0, 7.0]) + model.bias
    assert scores.mean().item() == pytest.approx(0, abs=1e-6) and scores.std(correction=0).item() == pytest.approx(1)


def test_trap_d2_normalizing_again_on_the_same_responses_changes_nothing(reward_model):
    """It reads raw scores: gain and bias of the first time do not enter."""
    model = reward_model(torch.float32)
    model.normalize_on(pairs())
    first = model.gain.item(), model.bias.item()
    scores = model.outcomes(batch_of(pairs())[0])
    assert scores.mean().item() == pytest.approx(0, abs=1e-5)
    assert scores.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    model.normalize_on(pairs())
    assert (model.gain.item(), model.bias.item()) == first


def test_trap_d2_the_order_of_any_two_scores_stays(reward_model):
    model = reward_model()
    model.normalize_on(pairs())
    rollout, _ = batch_of(pairs())
    raw, found = model.outcomes(rollout, raw=True), model.outcomes(rollout)
    assert model.gain > 0 and torch.equal(raw.argsort(), found.argsort())


@pytest.mark.parametrize("raw", [[2.0, 2.0, 2.0], [0.1] * 1001, [0.0, 0.0], [-0.7] * 3, [5.0]])
def test_trap_d2_equal_scores_become_zeros_and_stay_finite(raw):
    """Rounding alone makes the deviation of 1,001 times 0.1 in single precision 7e-9: no unit to divide by."""
    model = normalized(raw)
    assert model.gain == 1
    scores = model.gain * torch.tensor(raw) + model.bias
    torch.testing.assert_close(scores, torch.zeros(len(raw)), rtol=0, atol=1e-6)


def test_trap_d2_gain_and_bias_survive_saving_and_loading(reward_model, tmp_path):
    model = normalized([3.0, 5.0, 7.0], reward_model())
    rewarding.save(tmp_path, model, {"accuracy": 0.5})
    loaded, report = rewarding.load(tmp_path)
    assert report == {"accuracy": 0.5}
    assert torch.equal(loaded.gain, model.gain) and torch.equal(loaded.bias, model.bias)
    assert torch.equal(loaded.outcomes(given()), model.outcomes(given()))
    assert not any(weight.requires_grad for weight in loaded.parameters())


def test_the_critic_keeps_gain_and_bias():
    critic = critic_from(normalized([3.0, 5.0, 7.0]))
    assert critic.gain.item() == pytest.approx(0.612372, abs=1e-6)
    assert "gain" not in dict(critic.named_parameters())  # not learned: with the head it would be one too many


# ---- how far it can be trusted


def examined(monkeypatch, chosen: list[float], rejected: list[float], responses=None) -> dict:
    """examine() of a model that gives these scores."""
    monkeypatch.setattr(RewardModel, "outcomes", lambda self, rollout, raw=False: torch.tensor(chosen + rejected))
    responses = responses or [([1], [1, 1])] * len(chosen)
    return examine(RewardModel(CONFIG), [Pair([5], a, b) for a, b in responses])


def test_accuracy_and_calibration_are_those_worked_out_by_hand(monkeypatch):
    """Differences 1, -0.2, 3, 0.2, -3, 0: sure of the favourite 0.731, 0.550, 0.953, 0.550, 0.953, 0.5; right three
    times. Bins of a tenth from 0.5: [0.550, 0.550, 0.5], [0.731], [0.953, 0.953]."""
    found = examined(monkeypatch, [1.0, 0.0, 3.0, 0.2, 0.0, 1.0], [0.0, 0.2, 0.0, 0.0, 3.0, 1.0])
    assert found["accuracy"] == pytest.approx(3 / 6, abs=1e-6) and found["pairs"] == 6
    expected = [[(0.549834 * 2 + 0.5) / 3, 1 / 3, 3], [0.731059, 1.0, 1], [0.952574, 1 / 2, 2]]
    for line, right in zip(found["calibration"], expected, strict=True):
        assert line == pytest.approx(right, abs=1e-6)
    error = abs(0.533223 - 1 / 3) * 3 + abs(0.731059 - 1) + abs(0.952574 - 0.5) * 2
    assert found["calibration_error"] == pytest.approx(error / 6, abs=1e-6)
    losses = [0.313262, 0.798139, 0.048587, 0.598139, 3.048587, 0.693147]  # log(1 + exp(-difference))
    assert found["loss"] == pytest.approx(sum(losses) / 6, abs=1e-6)


def test_a_model_that_is_as_sure_as_it_is_right_has_no_calibration_error(monkeypatch):
    """Four pairs, difference log 3: sure with 3/4, right three times of four."""
    sure = math.log(3)
    found = examined(monkeypatch, [sure, sure, sure, 0.0], [0.0, 0.0, 0.0, sure])
    assert found["accuracy"] == 0.75 and found["calibration_error"] == pytest.approx(0, abs=1e-6)


def test_certainty_without_limit_stays_in_the_last_bin(monkeypatch):
    found = examined(monkeypatch, [1e6, 0.0], [0.0, 1e6])
    assert found["calibration"] == [[1.0, 0.5, 2]] and math.isfinite(found["loss"])


def test_the_correlation_of_score_and_length_is_pearsons(monkeypatch):
    """Lengths 1, 2 (chosen), 3, 4 (rejected)."""
    responses = [([1], [1] * 3), ([1] * 2, [1] * 4)]
    assert examined(monkeypatch, [1.0, 2.0], [3.0, 4.0], responses)["length_correlation"] == pytest.approx(1)
    assert examined(monkeypatch, [4.0, 3.0], [2.0, 1.0], responses)["length_correlation"] == pytest.approx(-1)
    # Scores 1, 0, 0, 1: covariance 0. Scores 0, 0, 0, 1: 1.5 / sqrt(5 x 0.75) = 0.774597
    assert examined(monkeypatch, [1.0, 0.0], [0.0, 1.0], responses)["length_correlation"] == pytest.approx(0)
    found = examined(monkeypatch, [0.0, 0.0], [0.0, 1.0], responses)["length_correlation"]
    assert found == pytest.approx(0.774597, abs=1e-6)
    assert examined(monkeypatch, [2.0, 2.0], [2.0, 2.0], responses)["length_correlation"] == 0
    assert correlation(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])) == 0


def test_normalization_changes_neither_accuracy_nor_calibration(reward_model):
    """Probabilities are those of raw scores: divided by their deviation they would claim another certainty."""
    model = reward_model(torch.float32)
    before = examine(model, pairs())
    model.normalize_on(pairs())
    assert model.gain != pytest.approx(1.7, abs=0.1)
    assert examine(model, pairs()) == before


def test_the_report_is_plain_data_and_said_in_one_line(reward_model):
    report = examine(reward_model(torch.float32), pairs())
    assert json.loads(json.dumps(report)) == report
    line = rewarding.describe(report)
    assert f"accuracy {report['accuracy']:.3f} on 40 fresh pairs" in line and "\n" not in line
    assert f"length {report['length_correlation']:+.2f}" in line


# ---- its folder


@pytest.fixture
def folder(reward_model, tmp_path):
    rewarding.save(tmp_path / "run", reward_model(torch.float32), {"accuracy": 0.75})
    return tmp_path / "run"


SHAPE = GPTConfig(20, width=64, layers=1, heads=2, max_context=96)  # of a policy: its own width is its own affair


def test_rm_names_the_folder_of_the_run_or_that_of_the_model(folder):
    of_run, report = from_option(f"rm:{folder}", SHAPE)
    itself, again = from_option(f"rm:{folder / 'reward_model'}", SHAPE)
    assert torch.equal(of_run.outcomes(given()), itself.outcomes(given()))
    assert report == again == {"accuracy": 0.75}


@pytest.mark.parametrize("option", ["xyz", "rm:", "rm", "RM:runs", "gold:runs"])
def test_a_reward_of_another_kind_is_an_error_that_says_what_to_write(option):
    with pytest.raises(
        RunError, match=rf"--reward {option} is unknown: write rm:DIR, the folder of a run of train_ppo"
    ):
        from_option(option, SHAPE)


def test_a_folder_without_a_reward_model_is_an_error(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        with pytest.raises(RunError, match=rf"{name} holds no reward model: give the folder of a run of train_ppo\.py"):
            from_option(f"rm:{tmp_path / name}", SHAPE)
    shutil.rmtree(folder / "reward_model")
    with pytest.raises(RunError, match="holds no reward model"):
        from_option(f"rm:{folder}", SHAPE)


@pytest.mark.parametrize("change", [{"vocab_size": 21}, {"vocab_size": 19}, {"max_context": 97}])
def test_a_reward_model_that_cannot_read_what_the_policy_writes_is_an_error(change, folder):
    with pytest.raises(RunError, match=r"reads 96 tokens of a vocabulary of 20, the policy writes .*: train another"):
        from_option(f"rm:{folder}", dataclasses.replace(SHAPE, **change))
    from_option(f"rm:{folder}", dataclasses.replace(SHAPE, max_context=30))  # it may be able to read more


@pytest.mark.parametrize("name", ["reward_model.safetensors", "reward_model.json", "training.pt"])
def test_a_damaged_reward_model_is_an_error_that_names_its_folder(name, folder):
    path = folder / "reward_model" / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(RunError, match=r"reward_model is damaged"):
        from_option(f"rm:{folder}", SHAPE)


@pytest.mark.parametrize(
    ("name", "damage"),
    {
        "another depth": (
            "reward_model.json",
            lambda path: path.write_text(path.read_text().replace('"layers": 2', '"layers": 3')),
        ),
        "nested too deep": ("reward_model.json", lambda path: path.write_text("[" * 100_000)),
        "no weights": ("reward_model.safetensors", lambda path: save_file({}, path)),
        "other weights": ("reward_model.safetensors", lambda path: save_file({"gain": torch.ones(())}, path)),
        "a text": ("training.pt", lambda path: path.write_text("hello")),
        "no report": ("training.pt", lambda path: torch.save({"step": 3}, path)),
        "a list": ("training.pt", lambda path: torch.save([3], path)),
    }.values(),
)
def test_whatever_stands_in_a_reward_models_files_the_error_names_its_folder(name, damage, folder):
    damage(folder / "reward_model" / name)
    with pytest.raises(RunError, match=r"reward_model is damaged"):
        from_option(f"rm:{folder}", SHAPE)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_reward_model_with_a_weight_that_is_no_number_is_an_error_before_any_work(broken, reward_model, tmp_path):
    model = reward_model()
    model.blocks[0].ffn.down.weight.data[0, 0] = broken
    rewarding.save(tmp_path, model, {})
    with pytest.raises(RunError, match="holds a reward model whose weights are not all finite numbers"):
        from_option(f"rm:{tmp_path}", SHAPE)


def test_a_save_that_is_killed_leaves_nothing_that_could_be_read(reward_model, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rewarding.checkpoint.os, "rename", killed)
        rewarding.save(tmp_path, reward_model(), {})
    with pytest.raises(RunError, match="holds no reward model"):
        rewarding.load(tmp_path)
    rewarding.save(tmp_path, reward_model(), {})  # done again it succeeds and clears up
    assert [path.name for path in tmp_path.iterdir()] == ["reward_model"]
