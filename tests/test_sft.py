"""The warm start: a loss on responses alone, and a cache that is right or absent."""

import copy
import inspect
import math

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

import kernels.linear
from nanorl import model, scorer, sft
from nanorl.errors import RunError
from nanorl.model import GPT, GPTConfig
from nanorl.optimizers import Optimizers
from nanorl.sft import cached_warm_start, demonstrations, warm_start
from nanorl.tasks.chain import ChainArithmetic

TASK = ChainArithmetic()
EOS = TASK.tokenizer.eos_id


def small_policy(dtype: torch.dtype = torch.float32, *, sharp: bool = False, **config) -> GPT:
    """`sharp`: weights large enough for predictions far from uniform."""
    torch.manual_seed(0)
    shape = {"vocab_size": TASK.tokenizer.vocab_size, "width": 16, "layers": 1, "heads": 2, "max_context": 40}
    policy = GPT(GPTConfig(**(shape | config))).to(dtype)
    for weight in policy.parameters():
        if sharp and weight.dim() == 2:
            nn.init.normal_(weight, std=0.5)
    return policy


def same_weights(a: GPT, b: GPT) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


# ---- the loss


def cross_entropies(policy: GPT, key: str, n: int) -> dict[str, list[float]]:
    """-log p of every token but the first, one sequence at a time through the full logits; prompt, response, stop."""
    found = {"prompt": [], "response": [], "stop": []}
    for problem in TASK.training_problems(n, key):
        prompt = TASK.tokenizer.encode(problem.prompt)
        ids = [*prompt, *TASK.tokenizer.encode(TASK.demonstration(problem, key)), EOS]
        with torch.no_grad():
            logits = policy(torch.tensor([ids]))[0] @ policy.head.T  # (L, V)
        for position in range(1, len(ids)):
            place = "prompt" if position < len(prompt) else "stop" if ids[position] == EOS else "response"
            found[place].append(-float(logits[position - 1].log_softmax(-1)[ids[position]]))
    return found


def first_loss(policy: GPT, **options) -> float:
    losses = []
    warm_start(copy.deepcopy(policy), TASK, steps=1, seed=5, report=lambda step, loss: losses.append(loss), **options)
    return losses[0]


def test_the_loss_is_the_mean_over_response_tokens_and_the_stop_token():
    policy = small_policy(torch.float64, sharp=True)
    found = cross_entropies(policy, "sft 5 0", 40)
    assert len(found["stop"]) == 40
    counted = found["response"] + found["stop"]
    # float32 is the precision in which the total is reported
    assert first_loss(policy, batch=40) == pytest.approx(sum(counted) / len(counted), rel=1e-6)
    for others in (found["response"], counted + found["prompt"]):
        assert abs(sum(others) / len(others) - sum(counted) / len(counted)) > 1e-2  # a wrong mean would show


def test_no_prompt_token_is_a_target():
    record = demonstrations(TASK, 20, "key")
    problems = TASK.training_problems(20, "key")
    for row, problem in enumerate(problems):
        response = record.tokens[row][record.mask[row]].tolist()
        assert response == [*TASK.tokenizer.encode(TASK.demonstration(problem, "key")), EOS]
        assert response.count(EOS) == 1 and record.prompts[row] == TASK.tokenizer.encode(problem.prompt)


def test_the_only_targets_are_response_tokens_and_stop_tokens(monkeypatch):
    """... so what would be predicted in place of a prompt token has no effect."""
    linear_logprob, scored = scorer.linear_logprob, []

    def keep(hidden, weight, targets, **options):
        scored.extend(targets[targets != options["ignore_index"]].tolist())
        return linear_logprob(hidden, weight, targets, **options)

    monkeypatch.setattr(scorer, "linear_logprob", keep)
    first_loss(small_policy(), batch=40)
    texts = [TASK.demonstration(problem, "sft 5 0") for problem in TASK.training_problems(40, "sft 5 0")]
    assert sorted(scored) == sorted(token for text in texts for token in [*TASK.tokenizer.encode(text), EOS])


def gradients(monkeypatch, micro_batch: int) -> dict[str, torch.Tensor]:
    """Of the first step, before clipping."""
    policy, seen = small_policy(torch.float64, sharp=True), {}
    with monkeypatch.context() as patched:
        patched.setattr(sft, "MICRO_BATCH", micro_batch)

        def keep(self, loss, rate):
            seen.update({name: weight.grad.clone() for name, weight in policy.named_parameters()})

        patched.setattr(Optimizers, "update", keep)
        warm_start(policy, TASK, steps=1, seed=0, batch=24)
    return seen


def test_the_gradient_is_that_of_the_whole_batch_for_any_micro_batch(monkeypatch):
    whole = gradients(monkeypatch, 1000)
    for micro_batch in (1, 7, 23):
        parts = gradients(monkeypatch, micro_batch)
        assert parts.keys() == whole.keys()
        for name, gradient in parts.items():
            assert torch.allclose(gradient, whole[name], rtol=1e-10, atol=1e-12), name


def test_the_loss_falls():
    losses = []
    policy = small_policy()
    warm_start(policy, TASK, steps=60, seed=0, batch=24, report=lambda step, loss: losses.append(loss))
    assert len(losses) == 60
    assert losses[0] == pytest.approx(math.log(TASK.tokenizer.vocab_size), abs=0.1)  # a fresh model knows nothing
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]


def test_the_warm_start_is_a_function_of_seed_and_first_weights():
    policies = [small_policy() for _ in range(3)]
    for policy, seed in zip(policies, (1, 1, 2), strict=True):
        torch.rand(seed)  # the state of torch's generator plays no part
        warm_start(policy, TASK, steps=3, seed=seed, batch=8)
    assert same_weights(policies[0], policies[1])
    assert not same_weights(policies[0], policies[2])


def test_a_loss_that_is_not_finite_never_reaches_the_weights_and_ends_the_warm_start(monkeypatch):
    policy, score, calls = small_policy(), sft.score, []

    def broken(model, part):
        calls.append(part)
        logprobs, entropy = score(model, part)
        return logprobs * math.nan, entropy

    monkeypatch.setattr(sft, "score", broken)
    with pytest.raises(RunError, match="5 updates in a row"):
        warm_start(policy, TASK, steps=100, seed=0, batch=8)
    assert same_weights(policy, small_policy()) and len(calls) == 5


# ---- the cache


def run_cached(folder, seed: int = 0, steps: int = 2, batch: int = 8, dtype=torch.float32, **config):
    policy, steps_reported = small_policy(dtype, **config), []
    found = cached_warm_start(
        policy, TASK, folder, steps=steps, seed=seed, batch=batch, report=lambda step, loss: steps_reported.append(step)
    )
    assert steps_reported == ([] if found else list(range(steps)))
    return policy, found


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_the_same_warm_start_is_found_again_bit_by_bit(tmp_path, monkeypatch):
    folder = tmp_path / "warm_starts"
    trained, found = run_cached(folder)
    assert not found and len(files(folder)) == 1
    monkeypatch.setattr(sft, "warm_start", None)  # nothing is trained any more
    again, found = run_cached(folder)
    assert found and same_weights(again, trained) and not same_weights(again, small_policy())
    assert all(weight.requires_grad for weight in again.parameters())


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"steps": 3},
        {"batch": 9},
        {"width": 32},
        {"layers": 2},
        {"heads": 1},
        {"max_context": 41},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_another_warm_start_gets_a_file_of_its_own(tmp_path, other):
    run_cached(tmp_path)
    first = files(tmp_path)
    policy, found = run_cached(tmp_path, **other)
    assert not found and len(files(tmp_path)) == 2 and set(first) < set(files(tmp_path))
    again, found = run_cached(tmp_path, **other)
    assert found and same_weights(policy, again)


@pytest.mark.parametrize("module", [sft, model, kernels.linear, kernels.rows, inspect.getmodule(ChainArithmetic)])
def test_code_that_changed_trains_anew(tmp_path, monkeypatch, module):
    run_cached(tmp_path)
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda m: source(m) + "# changed" * (m is module))
    assert not run_cached(tmp_path)[1]


def test_a_write_that_breaks_off_leaves_no_broken_file_to_be_found(tmp_path, monkeypatch):
    from safetensors.torch import save

    def half(tensors, path):
        content = save(tensors)
        path.write_bytes(content[: len(content) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sft, "save_file", half)
        run_cached(tmp_path)
    assert files(tmp_path) == []
    trained, found = run_cached(tmp_path)
    again, found_again = run_cached(tmp_path)
    assert not found and found_again and same_weights(trained, again)


def test_a_full_disk_costs_the_warm_starts_file_and_not_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(sft, "save_file", full)
    with pytest.warns(UserWarning, match="could not be kept for the next run"):
        assert run_cached(tmp_path)[1] is False


def test_a_warm_start_that_is_stopped_leaves_nothing(tmp_path):
    def stop(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_warm_start(small_policy(), TASK, tmp_path / "warm_starts", steps=2, seed=0, batch=8, report=stop)
    assert not (tmp_path / "warm_starts").exists()


def test_a_warm_start_of_no_steps_leaves_the_weights_alone(tmp_path):
    policy, _ = run_cached(tmp_path, steps=0)
    assert same_weights(policy, small_policy())
