"""Checks of lesson 01, shared by exercise.py and solution.py. Values by hand, and against nanorl's own functions."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # first: another package is named `kernels` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import gradient, require, require_close, run

from nanorl.model import GPT, GPTConfig, rotate
from nanorl.sampler import Sampler, truncate, uniform
from nanorl.scorer import score

__all__ = ["CHECKS", "run"]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def check_response_logprobs(response_logprobs):
    """The token at place i is predicted by the logits behind place i - 1. So the first response token is predicted
    behind the prompt's last token, and the logits behind the last token of all predict nothing that was written."""
    logits = torch.tensor([[9.0, -9.0], [2.0, 0.0], [0.0, 0.0], [-9.0, 9.0]], dtype=torch.double, requires_grad=True)
    got = response_logprobs(logits, torch.tensor([0, 1]), torch.tensor([1, 0]))
    case = "logits [[9, -9], [2, 0], [0, 0], [-9, 9]], prompt [0, 1], response [1, 0]"
    require_close(got, [-2.126928011043, -0.693147180560], case)
    want = [[0.0, 0.0], [-0.880797077978, 0.880797077978], [0.5, -0.5], [0.0, 0.0]]
    require_close(gradient(got.sum(), logits, case), want, case + ", gradient of the sum")
    got = response_logprobs(logits.detach()[:2], torch.tensor([0]), torch.tensor([0]))
    require_close(got, [-1.522998e-8], "the first two rows, prompt [0], response [0]")


def check_response_mask(response_mask):
    """Count the stop tokens BEFORE each place: cumsum counts this place too, so subtract it. Do not compare with the
    padding id: here padding and stop token are the same id."""
    tokens = torch.tensor([[7, 8, 2, 2, 2], [7, 8, 9, 7, 8], [2, 2, 2, 2, 2], [7, 2, 5, 5, 2]])
    want = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    require_close(response_mask(tokens.clone(), [2]), want, f"tokens {tokens.tolist()}, stop token 2")
    tokens = torch.tensor([[7, 3, 2, 5], [7, 2, 3, 3]])
    want = [[1, 1, 0, 0], [1, 1, 0, 0]]
    require_close(response_mask(tokens.clone(), [2, 3]), want, f"tokens {tokens.tolist()}, stop tokens 2 and 3")


def check_tempered_logprobs(tempered_logprobs):
    """First divide by the temperature, then log_softmax. The other way round the probabilities no longer sum to 1."""
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.double)
    cases = [
        (0.5, [-0.018149927918, -4.018149927918]),
        (1.0, [-0.126928011043, -2.126928011043]),
        (2.0, [-0.313261687518, -1.313261687518]),
    ]
    for temperature, want in cases:
        require_close(tempered_logprobs(logits.clone(), temperature), [want], f"logits [2, 0], T = {temperature:g}")
    far = torch.tensor([[1000.0, 0.0], [0.0, 0.0]], dtype=torch.double)
    want = [[0.0, -2000.0], [-0.693147180560, -0.693147180560]]
    require_close(tempered_logprobs(far, 0.5), want, "logits [[1000, 0], [0, 0]], T = 0.5")


def check_top_p_probs(top_p_probs):
    """Sort from the likeliest down. A token stays if the probabilities BEFORE it sum to less than top_p. Set the others
    to 0, divide by the sum, and put everything back where it stood (scatter)."""
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]], dtype=torch.double)
    want = [[0.625, 0.375, 0.0], [0.0, 0.625, 0.375]]
    require_close(top_p_probs(probs.clone(), 0.75), want, "probs [[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]], top_p 0.75")
    for top_p, want in ((0.5, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (0.01, [[1.0, 0, 0], [0, 1.0, 0]]), (1.0, probs)):
        require_close(top_p_probs(probs.clone(), top_p), want, f"the same, top_p {top_p:g}")
    logprobs = (2 * random(5, 12, seed=1)).log_softmax(-1)
    want = truncate(logprobs, None, 0.8).softmax(-1)
    require_close(top_p_probs(logprobs.exp(), 0.8), want, "five random rows of 12, top_p 0.8")


def check_inverse_cdf(inverse_cdf):
    """cumsum, then torch.searchsorted with right=True: the first entry that is larger, not the first that is as large.
    Rounding may leave the sum a little below 1: scale the uniform number by it."""
    probs = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.double)
    for number, token in ((0.0, 0), (0.49, 0), (0.5, 1), (0.74, 1), (0.75, 2), (0.99, 2)):
        got = inverse_cdf(probs.clone(), torch.tensor([number], dtype=torch.double))
        require_close(got, [token], f"probs [0.5, 0.25, 0.25], uniform number {number:g}")
    probs = torch.tensor([[0.0, 0.25, 0.75], [0.25, 0.75, 0.0]], dtype=torch.double)
    got = inverse_cdf(probs, torch.tensor([0.0, 1 - 2**-40], dtype=torch.double))
    require_close(got, [1, 1], "probs [[0, 0.25, 0.75], [0.25, 0.75, 0]], uniform numbers 0 and almost 1")
    got = inverse_cdf(torch.full((1, 10), 0.1, dtype=torch.double), torch.tensor([1 - 2**-53], dtype=torch.double))
    require_close(got, [9], "ten probabilities of 0.1, whose sum is rounded below 1, and a uniform number next to 1")


def check_cached_step(cached_step):
    """keys[rows, lengths] = key, with rows = torch.arange(B), writes one slot in each row. Then every row may see the
    slots 0 to lengths[b], the new one included: set the other scores to -inf before the softmax."""
    q, k, v = (random(3, 6, 4, seed=seed) for seed in (2, 3, 4))  # (B, 6, C)
    held = torch.tensor([0, 3, 1])
    keys, values = torch.full((3, 7, 4), 1e3, dtype=torch.double), torch.full((3, 7, 4), -1e3, dtype=torch.double)
    for row, n in enumerate(held.tolist()):
        keys[row, :n], values[row, :n] = k[row, :n], v[row, :n]
    rows = torch.arange(3)
    for step in range(2):
        at = held + step
        got = cached_step(q[rows, at], k[rows, at], v[rows, at], keys, values, at.clone())
        want = [
            torch.nn.functional.scaled_dot_product_attention(*(x[row, None, : n + 1] for x in (q, k, v)))[0, -1]
            for row, n in enumerate(at.tolist())
        ]
        require_close(got, torch.stack(want), f"step {step + 1} behind caches of {held.tolist()} entries")
        for row, n in enumerate(at.tolist()):
            require_close(keys[row, : n + 1], k[row, : n + 1], f"step {step + 1}, row {row}: the keys in the cache")
            require(bool((keys[row, n + 1 :] == 1e3).all()), f"step {step + 1}, row {row}: wrote into a later slot too")


def check_rotate_new_tokens(rotate_new_tokens):
    """What does the function know of the rows' lengths, and what does it use? Rotate a batch whose caches hold 3
    and 7 tokens, then each of the rows alone: nothing may change."""
    x = random(2, 4, seed=5)
    for lengths in ([5, 5], [7, 3]):
        positions = torch.tensor(lengths)
        angles = positions[:, None] * torch.tensor([1.0, 0.01], dtype=torch.double)
        want = rotate(x, angles.cos(), angles.sin())
        got = rotate_new_tokens(x.clone(), positions)
        require_close(got, want, f"caches of {lengths} tokens. The symptom is still there")


def check_generate(generate):
    """Follow `open_` of one row by hand while the model says 2 (its stop token), 2, 5, 5. When does the row wake up?"""
    said = torch.tensor([[7, 7, 2, 2, 2, 2], [2, 2, 5, 5, 5, 2], [8, 2, 2, 9, 9, 2]])  # (B, 6)
    calls = []

    def next_tokens(t: int) -> torch.Tensor:
        calls.append(t)
        return said[:, t].clone()

    tokens, mask = generate(next_tokens, 3, 2, 6)
    case = "three rows that stop at steps 3, 1 and 2"
    require(len(calls) == 3, f"{case}: the model was called {len(calls)} times, 3 would do. The symptom is still there")
    require_close(mask, [[1, 1, 1], [1, 0, 0], [1, 1, 0]], f"{case}, mask")
    require_close(tokens, [[7, 7, 2], [2, 0, 0], [8, 2, 0]], f"{case}, tokens")
    _, mask = generate(lambda t: said[1:, t], 2, 9, 6)
    want = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    require_close(mask, want, "two rows, of which one stops at step 4 and one never, mask")


def check_together(response_logprobs, tempered_logprobs, inverse_cdf):
    """The pieces pass alone, but do not make nanorl's sampler and scorer: look at the shapes that flow from one into
    the next."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=12, width=16, max_context=24)).double().requires_grad_(False)
    model.head_weight *= 50  # far from uniform
    prompt, temperature = [3, 1, 4, 1, 5], 0.7
    rollout = Sampler(model).generate([prompt], max_new_tokens=15, stop_ids=[], temperature=temperature, seed=6)
    uniforms = torch.from_numpy(uniform(6, [0], 15))  # (1, 15)
    sequence, written = torch.tensor([prompt]), []
    for t in range(15):
        logprobs = tempered_logprobs(model(sequence)[:, -1] @ model.head.T, temperature)  # (1, V)
        chosen = inverse_cdf(logprobs.exp(), uniforms[:, t])
        written.append(logprobs[0, chosen])
        sequence = torch.cat([sequence, chosen[:, None]], dim=1)
    require_close(sequence[0, 5:], rollout.tokens[0], "your tokens, against nanorl's sampler with the same numbers")
    case = "your log-probs while sampling, against nanorl's"
    require_close(torch.cat(written), rollout.behavior_logprobs[0], case)
    logits = model(sequence)[0] @ model.head.T / temperature
    got = response_logprobs(logits, torch.tensor(prompt), sequence[0, 5:])
    require_close(got, score(model, rollout)[0][0], "your log-probs of the whole response, against nanorl's scorer")
    require_close(got, torch.cat(written), "your log-probs of the whole response, against those while sampling")


CHECKS = [
    check_response_logprobs,
    check_response_mask,
    check_tempered_logprobs,
    check_top_p_probs,
    check_inverse_cdf,
    check_cached_step,
    check_rotate_new_tokens,
    check_generate,
    check_together,
]
