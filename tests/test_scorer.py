import numpy as np
import pytest
import torch

import nanorl.scorer
from nanorl.model import frozen_copy
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import hidden_states, score
from nanorl.tokenizer import Tokenizer

PROMPTS = [[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 3], [19, 0, 19]]
RESPONSES = [[1, 2, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4], [5], [], [6, 7, 8, 9, 10]]
FORMS = {
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "tied": True},
    "qwen3": {"head_width": 10},
}


def given() -> Rollout:
    return Rollout.from_responses(PROMPTS, RESPONSES)


def distributions(model, prompt, response, temperature):
    """Log-probabilities (T, V) before each token of the response, by one forward pass over one unpadded row."""
    with torch.no_grad():
        logits = (model(torch.tensor([prompt + response])) @ model.head.T)[0].double().numpy() / temperature
    logits = logits[len(prompt) - 1 : len(prompt) + len(response) - 1]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_trap_c1_scores_are_the_log_probs_and_entropies_of_each_row_alone(tiny_gpt, form, temperature):
    model = tiny_gpt(dtype=torch.float64, **form)
    rollout = given()
    rollout.temperature = temperature
    logprobs, entropy = score(model, rollout)
    assert logprobs.shape == entropy.shape == (5, 9)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = distributions(model, prompt, response, temperature)
        for t, token in enumerate(response):
            assert logprobs[row, t].item() == pytest.approx(expected[t, token], abs=1e-10)
            assert entropy[row, t].item() == pytest.approx(-(np.exp(expected[t]) * expected[t]).sum(), abs=1e-10)
        assert (logprobs[row, len(response) :] == 0).all() and (entropy[row, len(response) :] == 0).all()


def test_trap_c2_the_scorer_uses_the_temperature_that_sampled(table_model):
    # softmax([2, 0] / 0.5): token 0 has log-prob -log(1 + exp(-4)); untempered it would be -0.126928.
    model = table_model(torch.tensor([[2.0, 0.0]]).expand(8, 2))
    rollout = Sampler(model).generate([[1]], max_new_tokens=4, stop_ids=[], temperature=0.5)
    logprobs, _ = score(model, rollout)
    assert rollout.tokens.tolist() == [[0, 0, 0, 0]]
    for found in (logprobs, rollout.behavior_logprobs):
        torch.testing.assert_close(found, torch.full((1, 4), -0.018150), rtol=0, atol=5e-7)
    torch.testing.assert_close((logprobs - rollout.behavior_logprobs).exp(), torch.ones(1, 4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [{"top_k": 2}, {"top_p": 0.75}, {"top_k": 3, "top_p": 0.9, "temperature": 0.7}])
def test_trap_c2_a_truncated_rollout_is_refused(tiny_gpt, how):
    model = tiny_gpt()
    rollout = Sampler(model).generate(PROMPTS, max_new_tokens=4, stop_ids=[], **how)
    for part in (rollout, *rollout.split(2), rollout.select([0]), rollout.to("cpu")):
        with pytest.raises(ValueError, match=r"top-k or top-p.*sample without them"):
            score(model, part)


# ---- the first ratio is 1


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [None, 1, 3, 7])
def test_trap_c6_the_first_ratio_is_1_in_micro_batches_of_any_size(tiny_gpt, form, temperature, size):
    policy = tiny_gpt(**form)
    rollout = Sampler(policy).generate(
        PROMPTS, samples_per_prompt=4, max_new_tokens=24, stop_ids=[2], temperature=temperature, seed=5
    )
    assert len(set(rollout.lengths.tolist())) > 3
    for part in rollout.split(size):
        for model in (policy, frozen_copy(policy)):
            logprobs, _ = score(model, part)
            assert (logprobs - part.behavior_logprobs).abs().max() <= 1e-5
            assert ((logprobs - part.behavior_logprobs).exp() - 1).abs().max() <= 1e-5


def test_trap_c6_in_float64_the_first_ratio_is_1_to_ten_digits_even_for_a_sharp_model(tiny_gpt):
    policy = tiny_gpt(dtype=torch.float64)
    policy.head_weight.data *= 20
    rollout = Sampler(policy).generate(PROMPTS, samples_per_prompt=4, max_new_tokens=24, stop_ids=[2])
    assert rollout.behavior_logprobs.dtype == torch.float64
    for part in rollout.split(3):
        logprobs, _ = score(policy, part)
        torch.testing.assert_close(logprobs, part.behavior_logprobs, rtol=0, atol=1e-10)


def test_trap_c6_an_update_with_learning_rate_0_leaves_every_ratio_at_1(tiny_gpt):
    policy = tiny_gpt()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, weight_decay=0.1)
    rollout = Sampler(policy).generate(PROMPTS, samples_per_prompt=3, max_new_tokens=16, stop_ids=[2])
    for part in rollout.split(4):
        logprobs, _ = score(policy, part)
        (-logprobs.sum()).backward()
        optimizer.step()
        logprobs, _ = score(policy, part)
        assert ((logprobs - part.behavior_logprobs).exp() - 1).abs().max() <= 1e-5


def test_a_greedy_rollout_is_scored_at_temperature_1(tiny_gpt):
    model = tiny_gpt()
    rollout = Sampler(model).generate(PROMPTS, max_new_tokens=10, stop_ids=[2], greedy=True)
    logprobs, _ = score(model, rollout)
    torch.testing.assert_close(logprobs.detach(), rollout.behavior_logprobs, rtol=0, atol=1e-5)


# ---- padding and neighbours


def test_trap_c1_the_batch_has_the_gradient_of_its_rows_read_alone_and_no_nan(tiny_gpt):
    model = tiny_gpt(dtype=torch.float64)
    # Two rows share a prompt, whose reading the scorer shares too.
    rollout = Rollout.from_responses([*PROMPTS, PROMPTS[2]], [*RESPONSES, [1, 0, 2]])
    rollout.temperature = 0.7
    weights = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradients(objectives):
        model.zero_grad()
        for objective in objectives:
            objective.backward()
        return [weight.grad.clone() for weight in model.parameters()]

    def plainly(row):
        """The same objective for one row: a forward pass over all of it, and torch's own log-softmax."""
        prompt, response = rollout.prompts[row], rollout.tokens[row][rollout.mask[row]]
        hidden = model(torch.cat([torch.tensor(prompt), response])[None])[0, len(prompt) - 1 : -1]
        logprobs = (hidden @ model.head.T / 0.7).log_softmax(-1)  # (T, V)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs[torch.arange(len(response)), response]
        return ((chosen + 0.1 * entropy) * weights[row, : len(response)]).sum()

    def scored(rows):
        logprobs, entropy = score(model, rollout.select(rows))
        return ((logprobs + 0.1 * entropy) * weights[rows, : logprobs.shape[1]]).sum()

    expected = gradients(plainly(row) for row in range(6))
    assert all(gradient.abs().max() > 0 for gradient in expected)
    for parts in ([[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[4, 0], [5, 2], [3, 1]]):
        for found, right in zip(gradients(map(scored, parts)), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-10)  # which a NaN is not


def test_trap_c1_padding_and_what_stands_in_it_change_nothing(tiny_gpt):
    model = tiny_gpt(dtype=torch.float64)
    rollout = given()
    logprobs, entropy = score(model, rollout)
    for pad_id in (0, 2, 19):
        wide = torch.full((5, 14), pad_id)
        wide[:, :9] = torch.where(rollout.mask, rollout.tokens, pad_id)
        mask = torch.zeros(5, 14, dtype=torch.bool)
        mask[:, :9] = rollout.mask
        padded = Rollout(rollout.prompts, wide, mask, rollout.lengths, rollout.finish, rollout.groups)
        wide_logprobs, wide_entropy = score(model, padded)
        torch.testing.assert_close(wide_logprobs[:, :9], logprobs, rtol=0, atol=1e-12)
        torch.testing.assert_close(wide_entropy[:, :9], entropy, rtol=0, atol=1e-12)
        assert (wide_logprobs[:, 9:] == 0).all() and (wide_entropy[:, 9:] == 0).all()


def test_tokens_outside_the_mask_are_read_but_not_scored(tiny_gpt):
    model = tiny_gpt(dtype=torch.float64)
    rollout = given()
    plain, _ = score(model, rollout)
    rollout.mask[1, 2:5] = False  # say, what a tool answered in the middle of row 1
    logprobs, entropy = score(model, rollout)
    assert (logprobs[1, 2:5] == 0).all() and (entropy[1, 2:5] == 0).all()
    torch.testing.assert_close(logprobs[rollout.mask], plain[rollout.mask], rtol=0, atol=1e-12)
    rollout.tokens[1, 3] = 11
    changed, _ = score(model, rollout)
    assert torch.equal(changed[1, :2], logprobs[1, :2])
    assert ((changed - logprobs)[1, 5:].abs() > 1e-6).all()


def test_a_token_changes_the_log_probs_of_those_behind_it_and_none_before(tiny_gpt):
    model = tiny_gpt(dtype=torch.float64)
    before, _ = score(model, given())
    rollout = given()
    rollout.tokens[1, 4] = 11
    after, _ = score(model, rollout)
    same = after == before
    assert same[[0, 2, 3, 4]].all() and same[1].tolist() == [True] * 4 + [False] * 5


@pytest.mark.parametrize("rows", [[3], [3, 3]])
def test_empty_responses_have_empty_scores(tiny_gpt, rows):
    logprobs, entropy = score(tiny_gpt(), given().select(rows))
    assert logprobs.shape == entropy.shape == (len(rows), 0)


def test_trap_c5_a_response_that_fills_the_context_is_scored_to_its_last_token(tiny_gpt):
    model = tiny_gpt(max_context=16)
    rollout = Sampler(model).generate([[7] * 14, [7] * 3], max_new_tokens=20, stop_ids=[])
    assert rollout.lengths.tolist() == [2, 13]
    logprobs, _ = score(model, rollout)
    torch.testing.assert_close(logprobs.detach(), rollout.behavior_logprobs, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="17 tokens, the model's context holds 16"):
        score(model, Rollout.from_responses([[7] * 14], [[1, 2, 3]]))


# ---- what reaches the loss


@pytest.fixture
def scored_targets(monkeypatch):
    """What the scorer hands to linear_logprob: a list of (hidden states, targets)."""
    seen = []
    linear_logprob = nanorl.scorer.linear_logprob

    def spy(hidden, weight, targets, **options):
        seen.append((hidden, targets))
        return linear_logprob(hidden, weight, targets, **options)

    monkeypatch.setattr(nanorl.scorer, "linear_logprob", spy)
    return seen


def test_trap_h1_only_response_positions_reach_the_head(tiny_gpt, scored_targets):
    rollout = given()
    score(tiny_gpt(), rollout)
    ((hidden, targets),) = scored_targets
    assert hidden.shape == (5 * 9, 32)  # nothing of the prompts, the longest of which has 11 tokens
    assert targets[targets != nanorl.scorer.IGNORE].tolist() == [token for response in RESPONSES for token in response]


def test_trap_g1_the_sampled_ids_are_trained_on_not_those_of_the_text(scripted_model, scored_targets):
    tokenizer = Tokenizer({b"a": 0, b"b": 1, b"ab": 2}, r"(?s).+")
    assert tokenizer.encode("ab") == [2] and tokenizer.eos_id == 3
    model = scripted_model([0, 1, 1, 1], vocab_size=4)
    rollout = Sampler(model, tokenizer).generate([[3]], max_new_tokens=2, stop_ids=[tokenizer.eos_id])
    assert rollout.texts(tokenizer) == ["ab"]
    logprobs, _ = score(model, rollout)
    assert rollout.tokens.tolist() == [[0, 1]] and rollout.mask.tolist() == [[True, True]]
    assert rollout.behavior_logprobs.shape == logprobs.shape == (1, 2)
    assert scored_targets[0][1].tolist() == [0, 1]


def test_trap_g1_the_ids_in_the_loss_are_the_samplers_for_a_thousand_samples(tiny_gpt, scored_targets):
    tokenizer = Tokenizer({b"a": 0, b"b": 1, b"ab": 2, b"aa": 3, b"aab": 4}, r"(?s).+", bos=True)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (5, 6, 7)
    model = tiny_gpt(vocab_size=7)
    prompts = [tokenizer.encode_prompt(text) for text in ("a", "ab", "bba", "aabaab")]
    rollout = Sampler(model).generate(prompts, samples_per_prompt=250, max_new_tokens=10, stop_ids=[tokenizer.eos_id])
    sampled = [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths.tolist(), strict=True)]
    assert len(sampled) == 1000
    in_the_loss = []
    for part in rollout.split(64):
        score(model, part)
        targets = scored_targets[-1][1].view(part.tokens.shape)
        in_the_loss += [row[row != nanorl.scorer.IGNORE].tolist() for row in targets]
    assert sorted(in_the_loss) == sorted(sampled)
    assert any(tokenizer.bos_id in row for row in sampled) and any(tokenizer.eos_id in row for row in sampled)
    # Encoding the texts again would have changed many rows.
    again = [tokenizer.encode(tokenizer.decode(row), allow_control=True) for row in sampled]
    assert sum(a != b for a, b in zip(again, sampled, strict=True)) > 100


def test_trap_h1_responses_to_one_prompt_share_the_reading_of_it(tiny_gpt):
    model = tiny_gpt()
    read = []
    model.register_forward_pre_hook(lambda module, args: read.append(tuple(args[0].shape)))
    rollout = Sampler(model).generate([[7] * 30, [8] * 20], samples_per_prompt=5, max_new_tokens=4, stop_ids=[])
    read.clear()
    score(model, rollout)
    assert sum(rows * tokens for rows, tokens in read) <= 2 * 30 + 10 * 4


def test_trap_g2_prompt_and_response_stand_next_to_each_other_without_padding(tiny_gpt):
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)} | {b" $": 256}, r"(?s).+", bos=True)
    model = tiny_gpt(vocab_size=tokenizer.vocab_size, dtype=torch.float64)
    texts = [("p: ", "$5"), ("p: ", "5"), ("q", "$")]
    prompts = [tokenizer.encode_prompt(prompt) for prompt, _ in texts]
    rollout = Rollout.from_responses(prompts, [tokenizer.encode_response(response) for _, response in texts])
    logprobs, _ = score(model, rollout)
    assert rollout.prompts[0] == rollout.prompts[1]
    for row, (prompt, response) in enumerate(texts):
        trained = rollout.tokens[row][rollout.mask[row]].tolist()
        assert rollout.prompts[row] + trained == [tokenizer.bos_id, *(prompt + response).encode(), tokenizer.eos_id]
        assert tokenizer.decode(trained) == response + "<eos>"
        expected = distributions(model, prompts[row], trained, 1.0)  # one row, nothing between its two parts
        for t, token in enumerate(trained):
            assert logprobs[row, t].item() == pytest.approx(expected[t, token], abs=1e-10)


# ---- hidden states


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("read", [None, 0, 4, 9])
def test_state_t_is_that_of_a_plain_forward_pass_behind_the_prompt_and_t_tokens(tiny_gpt, form, read):
    model, rollout = tiny_gpt(dtype=torch.float64, **form), given()
    hidden = hidden_states(model, rollout, read=read)
    last = 8 if read is None else read  # T - 1, enough to predict every token
    assert hidden.shape == (5, last + 1, 32)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        plain = model(torch.tensor([prompt + response]))[0, len(prompt) - 1 :]
        for t in range(min(last, len(response)) + 1):
            torch.testing.assert_close(hidden[row, t], plain[t], rtol=0, atol=1e-10)


def test_the_last_token_is_read_where_it_is_asked_for_and_no_padding_before_it(tiny_gpt):
    """In rows that end early the state behind the last token is there too, whatever stands behind it."""
    model, rollout = tiny_gpt(dtype=torch.float64), given()
    hidden = hidden_states(model, rollout, read=9)
    rollout.tokens[~rollout.mask] = 19
    changed = hidden_states(model, rollout, read=9)
    for row, n in enumerate(rollout.lengths.tolist()):
        assert torch.equal(changed[row, : n + 1], hidden[row, : n + 1])
        alone = hidden_states(model, given().select([row]), read=n)
        torch.testing.assert_close(alone[0], hidden[row, : n + 1], rtol=0, atol=1e-10)


def test_gradients_pass_through_the_states_as_through_a_plain_forward_pass(tiny_gpt):
    model, plain = (tiny_gpt(dtype=torch.float64) for _ in range(2))
    hidden_states(model, given().select([0, 4]), read=5)[[0, 1], [3, 5]].square().sum().backward()
    for row in (0, 4):
        plain(torch.tensor([PROMPTS[row] + RESPONSES[row]]))[0, -1].square().sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-10)


def test_a_response_that_fills_the_context_can_be_read_to_its_last_token(tiny_gpt):
    model = tiny_gpt(max_context=16, dtype=torch.float64)
    rollout = Rollout.from_responses([[7] * 14, [7] * 3], [[1, 2], [3] * 13])
    hidden = hidden_states(model, rollout, read=13)
    plain = model(torch.tensor([[7] * 14 + [1, 2]]))[0, -1]
    torch.testing.assert_close(hidden[0, 2], plain, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="17 tokens, the model's context holds 16"):
        hidden_states(model, Rollout.from_responses([[7] * 14], [[1, 2, 3]]), read=3)
