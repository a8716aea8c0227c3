"""Lesson 10: its numbers are those of the code, and each form of the KL ends where the lesson says."""

import functools
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanorl.advantages import group_advantages
from nanorl.exact import World, total_variation
from nanorl.kl import exact_kl, kl_estimate

LESSON = Path(__file__).resolve().parents[1] / "lessons" / "10_measuring_kl"
README = (LESSON / "README.md").read_text()
PROSE = " ".join(README.split())  # wherever its lines break
KINDS = ("k1", "k2", "k3")


@pytest.fixture
def load(lesson_module):
    return functools.partial(lesson_module, LESSON)


@pytest.fixture
def kl_forms(load):
    return load("kl_forms")


@pytest.fixture
def figure(load, kl_forms, monkeypatch):
    monkeypatch.setitem(sys.modules, "kl_forms", kl_forms)
    return load("figure")


def gradient(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def cells(row: str) -> list[str]:
    return [cell.strip().strip("*") for cell in row.strip("|").split("|")]


def row_of(start: str) -> list[str]:
    """The cells behind the first one of the only table row that begins with `start`."""
    (row,) = (line for line in README.splitlines() if line.startswith(f"| {start} |"))
    return cells(row)[1:]


def length(vector: Tensor) -> float:
    return vector.norm().item()


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


# ---- by hand


@pytest.mark.parametrize("logprob, ref", [(-1.0, -1.5), (-1.5, -1.0)])
def test_trap_a4_values_and_slopes_of_the_first_table(logprob, ref):
    d = ref - logprob
    by_hand = [d, -d, d * d / 2, math.exp(d) - d - 1, 1, -d, 1 - math.exp(d)]
    shown = row_of(str(logprob))
    assert float(shown[0]) == ref
    assert [float(cell) for cell in shown[1:]] == pytest.approx(by_hand, abs=5e-7)


def test_trap_a4_the_three_tokens_of_the_second_table_and_their_gradients():
    logits = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    probs = logprobs.detach().exp()
    k = torch.stack([kl_estimate(logprobs, reference.log(), kind) for kind in KINDS])  # (3 kinds, 3 tokens)
    columns = torch.stack([probs, reference, (reference / probs).log(), *k.detach()])
    table = README.partition("| mean under")[0].splitlines()[-3:]
    for token, row in enumerate(table):
        assert [float(cell) for cell in cells(row)[1:]] == pytest.approx(columns[:, token].tolist(), abs=5e-5)
    means = (probs * k.detach()).sum(1)
    assert [float(c) for c in row_of(r"mean under $\pi$")[3:]] == pytest.approx(means.tolist(), abs=5e-5)
    deviations = (probs * (k.detach() - means[:, None]) ** 2).sum(1).sqrt()
    assert [float(c) for c in row_of("standard deviation")[3:]] == pytest.approx(deviations.tolist(), abs=5e-5)
    starts = ("mean gradient of $k_1$", r"of $k_2$ = $\nabla \text{KL}(\pi \Vert \pi_\text{ref})$")
    for i, start in enumerate((*starts, r"of $k_3$ = $\nabla \text{KL}(\pi_\text{ref} \Vert \pi)$")):
        found = gradient((probs * k[i]).sum(), logits)
        assert found.tolist() == pytest.approx([float(cell) for cell in row_of(start)], abs=5e-6)
    torch.testing.assert_close(found, probs - reference)  # of k3: that of a cross-entropy


def test_a_first_token_that_leads_to_the_kl_gets_no_gradient_of_a_per_token_kl():
    """After A policy and reference agree, after B their KL is 1 nat; the first token is even under both."""
    world = World(vocabulary=2, steps=2)
    ref_logits = torch.zeros(3, 2, dtype=torch.float64)
    ref_logits[2] = torch.tensor([0.9, 0.1], dtype=torch.float64).log()  # behind B
    low, high = 0.1, 1 - 1e-9  # by bisection, the policy there that is 1 nat away
    for _ in range(60):
        p = (low + high) / 2
        kl = p * math.log(p / 0.1) + (1 - p) * math.log((1 - p) / 0.9)
        low, high = (p, high) if kl < 1 else (low, p)
    logits = ref_logits.clone()
    logits[2] = torch.tensor([1 - p, p], dtype=torch.float64).log()
    logits.requires_grad_()
    assert world.prefixes == [(), (0,), (1,)]
    kl = world.kl(logits, ref_logits)
    assert kl.item() == pytest.approx(0.5)
    assert gradient(kl, logits)[0].tolist() == pytest.approx([-0.25, 0.25])
    for kind in KINDS:
        estimates = kl_estimate(world.logprobs(logits), world.logprobs(ref_logits), kind).sum(1)
        found = gradient((world.probs(logits).detach() * estimates).sum(), logits)[0]
        assert found.abs().max() < 1e-12
    assert gradient(world.kl_of_tokens(logits, ref_logits), logits)[0].abs().max() < 1e-12


def test_the_z_score_makes_full_advantages_of_a_little_kl_in_the_reward():
    k1 = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for beta in (0.04, 0.4):
        found = group_advantages(1 - beta * k1, torch.zeros(4, dtype=torch.long), scale="group")
        assert found.tolist() == pytest.approx([1.16, 0.39, -0.39, -1.16], abs=0.025)
        if beta == 0.04:
            assert "+1.14, +0.38, -0.38, -1.14" in PROSE
            assert found.tolist() == pytest.approx([1.14, 0.38, -0.38, -1.14], abs=5e-3)


def test_k3_misses_from_its_mean_what_the_policy_cannot_write():
    probs, reference = torch.tensor([0.6, 0.4, 0.0]).double(), torch.tensor([0.5, 0.3, 0.2]).double()
    seen = kl_estimate(probs[:2].log(), reference[:2].log(), "k3")
    true = exact_kl(probs.log(), reference.log())
    assert ((probs[:2] * seen).sum() - true).item() == pytest.approx(-0.2)


# ---- what pulls where


def test_k1_in_the_reward_and_k2_of_the_response_in_the_loss_are_the_same_vector_sample_by_sample(kl_forms):
    logits = kl_forms.WORLD.random_logits(0)
    for row in range(27):
        weights = torch.zeros(27, dtype=torch.float64)
        weights[row] = 1
        logits = logits.detach().requires_grad_()
        logprobs, ref_logprobs = (kl_forms.WORLD.logprobs(z).sum(1) for z in (logits, kl_forms.REFERENCE))
        in_reward = (weights * kl_estimate(logprobs, ref_logprobs, "k1").detach() * logprobs).sum()
        in_loss = (weights * kl_estimate(logprobs, ref_logprobs, "k2")).sum()
        torch.testing.assert_close(gradient(in_reward, logits), gradient(in_loss, logits), rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "response"])
def test_the_ratio_with_its_gradient_repairs_k3_as_a_loss_but_not_what_comes_next(level, kl_forms):
    world, ref_logits = kl_forms.WORLD, kl_forms.REFERENCE
    logits = world.random_logits(0).requires_grad_()
    logprobs, ref_logprobs = world.logprobs(logits), world.logprobs(ref_logits)
    if level == "response":
        logprobs, ref_logprobs = logprobs.sum(1, keepdim=True), ref_logprobs.sum(1, keepdim=True)
    ratio = (logprobs - logprobs.detach()).exp()
    penalty = (ratio * kl_estimate(logprobs, ref_logprobs, "k3")).sum(1)
    found = gradient((world.probs(logits).detach() * penalty).sum(), logits)
    true = {"response": world.kl, "token": world.kl_of_tokens}[level](logits, ref_logits)
    torch.testing.assert_close(found, gradient(true, logits), rtol=0, atol=1e-12)


def test_k3_in_the_reward_follows_a_difference_that_vanishes_close_to_the_reference(kl_forms, figure):
    policy = figure.away(0, 0.1)
    pull, true = figure.pull(policy, "k3 in the reward"), figure.true_pull(policy)
    variable = policy.clone().requires_grad_()
    reversed_order = gradient(kl_forms.WORLD.kl(kl_forms.REFERENCE, variable), variable)
    torch.testing.assert_close(pull, true - reversed_order, rtol=0, atol=1e-12)
    assert "has 0.06 of the true" in PROSE and round(length(pull) / length(true), 2) == 0.06
    assert "(cosine -0.69)" in PROSE and round(cosine(pull, true), 2) == -0.69


def test_bias_and_noise_of_the_estimates_as_the_policies_move_apart(kl_forms, figure):
    for step, shown in ((0.1, "0.0076"), (0.3, "0.063"), (1.0, "0.47"), (2.0, "1.07")):
        policy = figure.away(0, step)
        found = figure.values(policy)
        digits = len(shown.partition(".")[2])
        assert f"{kl_forms.WORLD.kl(policy, kl_forms.REFERENCE):.{digits}f}" == shown
        bias, *noise = row_of(shown)
        assert f"{100 * found['k2'][0]:+.1f} %" == bias
        assert [f"{found[kind][1]:.1f}" for kind in KINDS] == noise
        assert abs(found["k1"][0]) < 1e-9 and abs(found["k3"][0]) < 1e-9


def test_cosines_with_the_true_gradient_that_the_lesson_gives(kl_forms, figure):
    policy = figure.away(0, 1.0)
    found = {form: cosine(figure.pull(policy, form), figure.true_pull(policy)) for form in list(figure.DRAWN)[3:]}
    assert [round(found[f"k3 {level} in the loss"], 2) for level in ("a token", "of the response")] == [0.95, 0.86]
    assert "is at 0.95, $k_3$ of the response at 0.86" in PROSE
    assert found["k1 in the reward"] == pytest.approx(1) == found["k2 of the response in the loss"]


# ---- where training ends


def test_every_form_ends_where_the_table_says(kl_forms):
    ends = {}
    for form in kl_forms.FORMS:
        logits, distances = kl_forms.train(form)
        shown = [*(f"{number:.3f}" for number in kl_forms.summary(logits)), f"{distances[-1]:.3f}"]
        assert row_of(form) == shown, form
        ends[form] = logits
    exact = ("k1 in the reward", "k2 of the response in the loss")
    assert all(total_variation(kl_forms.WORLD.probs(ends[form]), kl_forms.OPTIMUM) < 1e-4 for form in exact)
    probs = kl_forms.WORLD.probs(ends["k1 in the reward, k2 of the response in the loss"])
    twice = kl_forms.WORLD.optimum(kl_forms.REFERENCE, kl_forms.REWARDS, 2 * kl_forms.BETA)
    assert total_variation(probs, twice) < 1e-6  # counted twice is twice beta
    torch.testing.assert_close(ends["k1 in the loss"], ends["no KL"], rtol=0, atol=1e-6)  # as if it were not there
    probs = kl_forms.WORLD.probs(ends["k3 of the response in the loss"])
    levels = kl_forms.REWARDS + kl_forms.BETA * kl_forms.WORLD.probs(kl_forms.REFERENCE) / probs  # lambda, for all
    assert levels.max() - levels.min() < 5e-3  # at the optimum of the other KL it is 0.98


def test_from_samples_k1_in_the_reward_still_arrives_and_k1_in_the_loss_still_does_not(kl_forms):
    _, arrives = kl_forms.train("k1 in the reward", 300, samples=32)
    _, does_not = kl_forms.train("k1 in the loss", 300, samples=32)
    assert arrives[-1] < 0.005 < 0.5 < does_not[-1]


def test_from_samples_a_baseline_takes_the_noise_of_a_kl_in_the_reward_and_not_that_in_the_loss(kl_forms):
    def ends(form: str) -> list[float]:
        return [kl_forms.train(form, 300, samples=32, seed=seed)[1][-1] for seed in range(3)]

    in_reward, in_loss = ends("k1 in the reward"), ends("k2 of the response in the loss")
    assert in_reward == pytest.approx([0.002, 0.001, 0.002], abs=6e-4)
    assert in_loss == pytest.approx([0.026, 0.027, 0.017], abs=6e-4)
    assert "off by 0.002, 0.001, 0.002" in PROSE and "by 0.026, 0.027, 0.017" in PROSE


# ---- exercises


@pytest.mark.parametrize(
    "blank, right, wrong",
    [
        ("estimates", "d = ref_logprobs.detach() - logprobs", "d = logprobs - ref_logprobs.detach()"),
        ("estimates", "ref_logprobs.detach()", "ref_logprobs"),
        ("estimates", "- logprobs\n", "- logprobs.detach() + 0 * logprobs\n"),
        ("slopes", "1 - d.exp()", "d.exp() - 1"),
        ("slopes", "torch.ones_like(d), -d", "torch.ones_like(d), d"),
        (
            "exact_kl",
            "torch.where(probs > 0, probs * (logprobs - ref_logprobs), 0.0)",
            "probs * (logprobs - ref_logprobs)",
        ),
        ("exact_kl", "probs = logprobs.exp()", "probs = ref_logprobs.exp()"),
        ("returns_with_kl", "rewards - beta", "rewards + beta"),
        ("returns_with_kl", ".detach()", ""),
        (
            "returns_with_kl",
            "torch.where(mask.bool(), logprobs - ref_logprobs, 0.0)",
            "(logprobs - ref_logprobs) * mask",
        ),
        ("returns_with_kl", ".sum(1)", ".mean(1)"),
        ("kl_to_come", ".flip(1).cumsum(1).flip(1)", ".cumsum(1)"),
        ("kl_to_come", ".detach()", ""),
        (
            "loss_that_holds_nothing_back",
            "(logprobs - ref_logprobs.detach()) ** 2 / 2",
            "logprobs - ref_logprobs.detach()",
        ),
        ("loss_that_holds_nothing_back", "** 2 / 2", "** 2"),
        (
            "loss_that_holds_nothing_back",
            "(logprobs - ref_logprobs.detach()) ** 2 / 2",
            "(ref_logprobs - logprobs).exp() - (ref_logprobs - logprobs) - 1",
        ),
    ],
)
def test_the_checks_refuse_a_wrong_answer(refused, blank, right, wrong):
    refused(LESSON, blank, right, wrong)


def test_the_silent_bug_has_another_mend_that_the_checks_accept(load):
    def with_kl_in_the_reward(logprobs, ref_logprobs, advantages, beta):
        k1 = (logprobs - ref_logprobs).detach()
        return -((advantages - beta * k1) * logprobs).mean()

    load("checks").check_loss_that_holds_nothing_back(with_kl_in_the_reward)


def test_the_silent_bug_grows_the_gradient_of_a_batch_with_beta_and_leaves_its_mean_alone(load):
    wrong = load("exercise").loss_that_holds_nothing_back
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = probs.log().requires_grad_()
    ref_logprobs = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)

    def batch_gradient(tokens: list[int], beta: float) -> Tensor:
        logprobs = logits.log_softmax(-1)[tokens]
        return gradient(wrong(logprobs, ref_logprobs[tokens], advantages[tokens], beta), logits)

    in_proportion = [0] * 5 + [1] * 3 + [2] * 2
    torch.testing.assert_close(batch_gradient(in_proportion, 1.0), batch_gradient(in_proportion, 0.0))
    as_drawn = [1, 1, 2, 1]
    norms = [length(batch_gradient(as_drawn, beta)) for beta in (0.0, 1.0, 10.0)]
    assert norms[0] < norms[1] < norms[2]
