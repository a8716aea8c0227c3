"""A loss of the reader's own runs with everything else unchanged, or is refused with what is wrong about it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import train_grpo
from nanorl import report
from nanorl.algorithms import ALGORITHMS
from nanorl.errors import RunError
from nanorl.losses import grpo_loss
from nanorl.options import parse
from nanorl.own_loss import with_own_loss
from nanorl.tasks.chain import ChainArithmetic

ROW = ALGORITHMS["grpo"]
TINY = {
    "size": (16, 1, 2),
    "warm_start_steps": 2,
    "eval_problems": 8,
    "prompts": 2,
    "group_size": 4,
    "steps": 2,
    "device": "cpu",
}
LOSS = """
from nanorl.losses.aggregate import token_mean

def my_loss(logprobs, old_logprobs, advantages, mask, *, scale=1.0, flavour="plain", denominator=None):
    ratio = (logprobs - old_logprobs).exp()
    loss = token_mean(-scale * ratio * advantages[:, None], mask, denominator)
    return loss, {"scale": scale, "plain": float(flavour == "plain")}
"""


@pytest.fixture
def write(tmp_path):
    def write(source: str, name: str = "my_loss.py") -> str:
        (tmp_path / name).write_text(source)
        return f"{tmp_path / name}:my_loss"

    return write


def batch() -> tuple[torch.Tensor, ...]:
    logprobs = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, -0.3, -0.1]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), mask


# ---- what is loaded


def test_the_function_of_the_file_takes_the_place_of_the_rows_loss_and_nothing_else(write):
    algorithm = with_own_loss(ROW, write(LOSS))
    assert dataclasses.replace(algorithm, loss=ROW.loss) == ROW
    loss, metrics = algorithm.loss(*batch(), denominator=5)
    assert loss.item() == pytest.approx((3 - 2) / 5) and metrics == {"scale": 1.0, "plain": 1.0}


def test_arguments_are_python_literals_or_texts(write):
    algorithm = with_own_loss(ROW, write(LOSS), ["scale=2.5", "flavour=k=v and more"])
    loss, metrics = algorithm.loss(*batch(), denominator=5)
    assert loss.item() == pytest.approx(2.5 / 5) and metrics == {"scale": 2.5, "plain": 0.0}
    spec = write(LOSS.replace('flavour="plain"', "flavour=None").replace('flavour == "plain"', "flavour == [1, None]"))
    assert with_own_loss(ROW, spec, ["flavour=[1, None]"]).loss(*batch())[1]["plain"] == 1.0


def test_the_file_may_choose_another_scale_of_advantages_and_another_mean(write):
    algorithm = with_own_loss(ROW, write('advantage_scale = "none"\nmean_over = "tokens"\n' + LOSS))
    assert (algorithm.advantage_scale, algorithm.mean_over) == ("none", "tokens")
    assert algorithm.denominator(batch()[3]) == 5


def test_without_a_file_the_arguments_are_those_of_the_algorithms_own_loss():
    assert with_own_loss(ROW, None) is ROW
    logprobs, old, advantages, mask = batch()
    algorithm = with_own_loss(ROW, None, ["dual_clip=3"])
    ten_times = old - torch.tensor(10.0).log()  # a ratio of 10 and an advantage of -1: dual clip bounds the loss at 3
    row = slice(1, 2)
    found, _ = algorithm.loss(logprobs[row], ten_times[row], advantages[row], mask[row])
    plain, _ = grpo_loss(logprobs[row], ten_times[row], advantages[row], mask[row])
    assert (found.item(), plain.item()) == pytest.approx((3.0, 10.0))


def test_options_of_the_script_reach_an_own_loss_that_has_them_and_are_an_error_otherwise(write):
    with_clip = LOSS.replace("*, scale=1.0", "*, clip_low=0.2, scale=1.0")
    assert with_own_loss(ROW, write(with_clip)).chosen(clip_low=0.1) == {"clip_low": 0.1}
    with pytest.raises(ValueError, match="my_loss has no clip_low"):
        with_own_loss(ROW, write(LOSS)).chosen(clip_low=0.1)


# ---- what is refused, before any work


HEAD = "def my_loss(logprobs, old_logprobs, advantages, mask, *, denominator=None):\n    "
MEAN = "-(advantages[:, None] * logprobs * mask)"
REFUSED = {
    "the arguments are swapped": (
        "def my_loss(logprobs, advantages, old_logprobs, mask, *, denominator=None):\n    return logprobs.sum(), {}",
        r"first four parameters are \(logprobs, advantages, old_logprobs, mask\)",
    ),
    "an argument is missing": (
        "def my_loss(logprobs, advantages, mask):\n    return logprobs.sum(), {}",
        r"first four parameters are \(logprobs, advantages, mask\)",
    ),
    "any keyword is taken": (
        "def my_loss(logprobs, old_logprobs, advantages, mask, **options):\n    return logprobs.sum(), {}",
        "would hide a misspelt keyword",
    ),
    "no denominator": (
        "def my_loss(logprobs, old_logprobs, advantages, mask):\n    return logprobs.sum(), {}",
        "no keyword `denominator`",
    ),
    "beta without a reference": (
        LOSS.replace("scale=1.0", "beta=0.0"),
        "`beta` without `ref_logprobs`",
    ),
    "a keyword without a value": (LOSS.replace("scale=1.0", "scale"), "scale of my_loss has no default"),
    "an option without a default": (
        LOSS.replace("*, scale=1.0", "*, clip_low, scale=1.0"),
        "clip_low of my_loss has no default: give it one",
    ),
    "the loss alone": (HEAD + f"return {MEAN}.sum()", r"returned a tensor of shape \(\) instead of the pair"),
    "no loss": (HEAD + "pass", "returned a NoneType instead of the pair"),
    "one loss a response": (HEAD + f"return {MEAN}.sum(1), {{}}", r"a loss of shape \(2,\) instead of a scalar"),
    "one loss a token": (HEAD + f"return {MEAN}, {{}}", r"a loss of shape \(2, 3\) instead of a scalar"),
    "a number": (HEAD + f"return {MEAN}.sum().item(), {{}}", "returned a float as the loss"),
    "detached": (HEAD + f"return {MEAN}.sum().detach(), {{}}", "a loss without a gradient"),
    "of something else": (
        HEAD + "import torch\n    return torch.ones((), requires_grad=True), {}",
        "does not depend on logprobs",
    ),
    "not finite": (HEAD + f"return {MEAN}.sum().log(), {{}}", "a loss of nan"),
    "metrics that are no dict": (HEAD + f"return {MEAN}.sum(), [1.0]", "a list as metrics"),
    "a metric a token": (
        HEAD + f"return {MEAN}.sum(), {{'size': logprobs.detach()}}",
        r"a metric 'size' that is a tensor of shape \(2, 3\)",
    ),
    "a metric with a gradient": (
        HEAD + f"return {MEAN}.sum(), {{'size': logprobs.sum()}}",
        "a metric 'size' that carries a gradient",
    ),
    "a mistake in it": (
        HEAD + "# a comment\n    return logprobs + torch.ones(7), {}",
        r"NameError: name 'torch' is not defined \(line 3 of my_loss\.py\)",
    ),
    "a mistake in what it calls": (
        HEAD + "from nanorl.losses.aggregate import token_mean\n    return token_mean(logprobs, mask[:1]), {}",
        r"ValueError: expected a mask \(2, 3\) like the values, got \(1, 3\) \(line 3 of my_loss\.py\)",
    ),
    "a shape that does not fit": (
        HEAD + "return (logprobs * advantages).sum(), {}",  # (2, 3) * (2,)
        r"failed on a small batch: RuntimeError: The size of tensor .*\(line 2 of my_loss\.py\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_breaks_the_contract_is_refused_and_the_contract_named(case, write):
    source, message = REFUSED[case]
    with pytest.raises(RunError, match=message) as refused:
        with_own_loss(ROW, write(source))
    assert "loss, metrics = f(logprobs, old_logprobs, advantages, mask, *, denominator=None, ...)" in str(refused.value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("scale", "expected KEYWORD=VALUE"),
        ("size=2", "size is not in its signature; my_loss has scale, flavour to set"),
        ("denominator=2", "denominator is handed over by the training loop"),
        ("mask=2", "mask is not in its signature"),
    ],
)
def test_an_argument_that_the_loss_does_not_have_is_refused(argument, message, write):
    with pytest.raises(RunError, match=message):
        with_own_loss(ROW, write(LOSS), [argument])


def test_a_file_or_function_that_is_not_there_is_named(write, tmp_path):
    spec = write(LOSS)
    with pytest.raises(RunError, match=r"expected FILE\.py:FUNCTION"):
        with_own_loss(ROW, spec.removesuffix(":my_loss"))
    with pytest.raises(RunError, match=r"there is no file .*other\.py \(looked in "):
        with_own_loss(ROW, f"{tmp_path / 'other.py'}:my_loss")
    with pytest.raises(RunError, match=r"has no function their_loss; it has my_loss$"):  # not what it imports
        with_own_loss(ROW, spec.replace(":my_loss", ":their_loss"))
    with pytest.raises(RunError, match=r"cannot be loaded: SyntaxError: .*line 2"):
        with_own_loss(ROW, write("\nfor for"))
    with pytest.raises(
        RunError, match=r"cannot be loaded: ZeroDivisionError: division by zero \(line 1 of my_loss\.py\)"
    ):
        with_own_loss(ROW, write("1 / 0"))
    with pytest.raises(RunError, match=r"mean_over = 'rows' is unknown: choose one of \('tokens', 'sequences'\)"):
        with_own_loss(ROW, write('mean_over = "rows"\n' + LOSS))


def test_a_gradient_at_padding_is_warned_about(write, recwarn):
    with_own_loss(ROW, write(LOSS))
    assert not recwarn
    with pytest.warns(UserWarning, match="my_loss has a gradient outside the mask"):
        with_own_loss(ROW, write(HEAD + "return -(advantages[:, None] * logprobs).mean(), {}"))


# ---- through the script


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.setattr(ChainArithmetic, "reward", lambda self, problem, text: float(len(text) % 2))  # both do occur
    monkeypatch.setattr(report, "draw_curves", lambda out: None)

    def train(name: str, **chosen) -> list[dict]:
        out = tmp_path / name
        train_grpo.main(train_grpo.Config(out=str(out), **(TINY | chosen)))
        return metrics(out)

    return train


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_an_own_loss_runs_through_the_script_and_logs_its_metrics(write, train):
    spec = write('mean_over = "tokens"\n' + LOSS)
    lines = train("run", loss=spec, loss_args=["scale=3"])
    assert len(lines) == 2
    for line in lines:
        assert (line["scale"], line["plain"]) == pytest.approx((3.0, 1.0)) and line["grad_norm"] > 0
    tripled, once = lines[0], train("again", loss=spec)[0]
    assert tripled["loss"] == pytest.approx(3 * once["loss"], rel=1e-6) and abs(once["loss"]) > 1e-4
    assert tripled["grad_norm"] == pytest.approx(3 * once["grad_norm"], rel=1e-5)


def test_a_copy_of_the_algorithms_loss_gives_the_same_run_bit_by_bit(write, train):
    source = "from nanorl.losses import grpo_loss\nmy_loss = grpo_loss"
    for line, own in zip(train("given"), train("own", loss=write(source)), strict=True):
        assert {k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")}.items() <= own.items()


def test_a_resumed_run_keeps_its_own_loss_and_its_arguments(write, train, tmp_path):
    train("run", loss=write(LOSS), loss_args=["scale=3", "flavour=x"])
    config = parse(train_grpo.Config, None, ["--out", str(tmp_path / "run"), "--resume", "--steps", "3"])
    assert config.loss_args == ["scale=3", "flavour=x"]
    train_grpo.main(config)
    lines = metrics(tmp_path / "run")
    assert [line["scale"] for line in lines] == pytest.approx([3.0] * 3)
    assert [line["plain"] for line in lines] == [0.0] * 3
    with pytest.raises(RunError, match="a resumed run keeps its options, but --loss-args differs"):
        parse(train_grpo.Config, None, ["--out", str(tmp_path / "run"), "--resume", "--loss-args", "scale=4"])


def test_a_wrong_loss_is_refused_before_the_run_has_a_folder(write, train, tmp_path):
    with pytest.raises(RunError, match="no keyword `denominator`"):
        train("run", loss=write(REFUSED["no denominator"][0]))
    assert not (tmp_path / "run").exists()


def test_on_the_command_line_arguments_stand_side_by_side():
    config = parse(train_grpo.Config, None, ["--loss", "a.py:b", "--loss-args", "x=1", "y=-2", "--seed", "3"])
    assert (config.loss, config.loss_args, config.seed) == ("a.py:b", ["x=1", "y=-2"], 3)


@pytest.mark.parametrize("mean", ["token_mean(x, mask, denominator)", "x.masked_fill(~mask, 0).sum() / denominator"])
def test_a_loss_that_cannot_take_an_advantage_for_each_token_is_an_error_with_importance_weights(write, mean):
    spec = write(
        LOSS.replace("token_mean(-scale * ratio * advantages[:, None], mask, denominator)", "MEAN").replace(
            "MEAN", mean.replace("x", "(-scale * ratio * advantages[:, None])")
        )
    )
    with_own_loss(ROW, spec)
    with_own_loss(ALGORITHMS["gspo"], spec, weighted=True)  # one weight a sequence
    with pytest.raises(RunError, match=r"with --importance-cap advantages are \(B, T\)"):
        with_own_loss(ROW, spec, weighted=True)


def test_a_loss_that_takes_both_shapes_of_advantages_passes_with_importance_weights(write):
    both = "(advantages if advantages.dim() == 2 else advantages[:, None])"
    with_own_loss(ROW, write(LOSS.replace("advantages[:, None]", both)), weighted=True)
