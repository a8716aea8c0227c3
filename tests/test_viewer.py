"""samples.html without a browser: what is in it, and that nothing in it can get out."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import train_grpo
from nanorl import checkpoint, report, viewer
from nanorl.evaluation import evaluate
from nanorl.model import GPT, GPTConfig
from nanorl.options import parse
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.tasks import TASKS
from nanorl.tasks.reviews import NOUNS, gold
from nanorl.tasks.task import Problem
from nanorl.tokenizer import Tokenizer

FIVE_DIGITS = 1e-4  # relative: numbers are rounded to five digits
TINY = {
    "steps": 2,
    "learning_rate": 0.02,
    "warm_start_steps": 3,
    "prompts": 2,
    "group_size": 4,
    "size": (16, 1, 2),
}
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'&quot;&lt;",
    "SCRIPT_DIGEST DATA_AS_JSON",
    "\x00\x07\x1b[31m\x7f",
    "\u2028\u2029\u202e\ufeff\U0001f600 \\u003c \\",
]


@pytest.fixture
def task():
    return TASKS["chain"]()


@pytest.fixture
def easier(monkeypatch):
    """The reward a model without any skill earns now and then: the right digit anywhere."""
    monkeypatch.setattr(TASKS["chain"], "reward", lambda self, problem, response: float(problem.answer in response))


@pytest.fixture
def gpt(tiny_gpt, task):
    """Builds a policy for chain arithmetic in float64."""
    return lambda seed: tiny_gpt(seed, vocab_size=task.tokenizer.vocab_size, max_context=40, dtype=torch.float64)


class Writing:
    """A task whose tokens are bytes, and whose right answers say "yes"."""

    tokenizer = Tokenizer.bytes()

    def reward(self, problem: Problem, response: str) -> float:
        return float("yes" in response)

    def describe(self, problem: Problem, response: str) -> dict[str, float]:
        return {"length": float(len(response))}


@pytest.fixture
def writing(tiny_gpt):
    """Builds the data of given responses, written by a model over bytes, all to one prompt."""

    def build(texts: list[str], mask=None, prompt: str = "?", answer: str = "yes") -> dict:
        tokenizer, model = Writing.tokenizer, tiny_gpt(vocab_size=Writing.tokenizer.vocab_size, max_context=128)
        rollout = Rollout.from_responses([tokenizer.encode(prompt)] * len(texts), [tokenizer.encode(t) for t in texts])
        rollout.groups.zero_()
        rollout.mask = rollout.mask if mask is None else rollout.mask & mask
        rows = viewer.responses(rollout, model, model, model, Writing(), [Problem(prompt, answer)])
        return {"problems": [{"prompt": prompt, "answer": answer, "before": rows, "after": rows}], "vocabulary": 257}

    return build


class Elements(HTMLParser):
    """Another reader of HTML than the browser: the elements of a page, and the text in its scripts."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append((dict(attributes), ""))

    def handle_data(self, text):
        if self.elements and self.elements[-1][0] == "script" and self.scripts:
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + text)

    def handle_endtag(self, tag):
        self.elements.append(("/" + tag, {}))


def written(tmp_path, data: dict, title: str = "grpo-1", result: str = "accuracy 0.4 → 0.9") -> str:
    viewer.write(tmp_path / "samples.html", data, title=title, result=result)
    return (tmp_path / "samples.html").read_bytes().decode("utf-8")


def read_back(page: str) -> dict:
    return json.loads(next(text for attributes, text in Elements(page).scripts if attributes.get("id") == "data"))


@torch.no_grad()
def by_hand(model: GPT, prompt: list[int], ids: list[int]) -> tuple[list[float], list[float]]:
    """Log-prob and entropy of each token of a response, from the logits of the whole sequence."""
    logits = model(torch.tensor([prompt + ids]))[0] @ model.head.T
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]  # (T, V)
    return [row[i].item() for row, i in zip(logprobs, ids, strict=True)], (-logprobs.exp() * logprobs).sum(1).tolist()


def test_the_numbers_are_those_of_the_policy_that_wrote_the_token_and_the_ratio_is_after_over_before(task, gpt):
    before, after = gpt(0), gpt(1)
    problems = task.held_out_problems(3)
    data = viewer.collect(before, after, task, problems, samples=2, max_new_tokens=9, seed=5)
    assert [(p["prompt"], p["answer"]) for p in data["problems"]] == [(p.prompt, p.answer) for p in problems]
    assert data["vocabulary"] == 17
    for problem in data["problems"]:
        prompt = task.tokenizer.encode(problem["prompt"])
        for side, writer in (("before", before), ("after", after)):
            assert len(problem[side]) == 2
            for response in problem[side]:
                logprobs, entropy = by_hand(writer, prompt, response["ids"])
                old, new = (torch.tensor(by_hand(m, prompt, response["ids"])[0]) for m in (before, after))
                assert response["logprob"] == pytest.approx(logprobs, rel=FIVE_DIGITS, abs=1e-9)
                assert response["entropy"] == pytest.approx(entropy, rel=FIVE_DIGITS, abs=1e-9)
                assert response["ratio"] == pytest.approx((new - old).exp().tolist(), rel=FIVE_DIGITS)


def test_the_responses_are_the_samplers_with_their_stop_tokens(task, gpt):
    policy, problems = gpt(0), task.held_out_problems(6)
    data = viewer.collect(policy, gpt(1), task, problems, samples=3, max_new_tokens=12, seed=7)
    rollout = Sampler(policy).generate(
        [task.tokenizer.encode(p.prompt) for p in problems],
        max_new_tokens=12,
        stop_ids=[task.tokenizer.eos_id],
        samples_per_prompt=3,
        seed=7,
    )
    rows = [response for problem in data["problems"] for response in problem["before"]]
    assert set(rollout.finish) == {"stop", "length"}  # both kinds are there to be told apart
    for row, response in enumerate(rows):
        ids = rollout.tokens[row, : rollout.lengths[row]].tolist()
        assert response["ids"] == ids
        assert "".join(response["texts"]) == task.tokenizer.decode(ids)
        assert response["mask"] == [True] * len(ids)
        assert response["logprob"] == pytest.approx(
            rollout.behavior_logprobs[row, : len(ids)].tolist(), rel=FIVE_DIGITS, abs=1e-9
        )
        stopped = rollout.finish[row] == "stop"
        assert response["finish"] == rollout.finish[row]
        assert response["stop"] == [False] * (len(ids) - 1) + [stopped]


def test_the_responses_are_those_that_the_evaluation_counts(task, gpt, easier):
    policy, problems = gpt(3), task.held_out_problems(60)
    data = viewer.collect(policy, policy, task, problems, samples=4, max_new_tokens=12)
    result = evaluate(policy, task, problems, 12, samples=4)
    rows = [response for problem in data["problems"] for response in problem["after"]]
    assert sum(row["right"] for row in rows) / len(rows) == pytest.approx(result["pass@1"])
    assert sum(row["right"] for row in rows[::4]) / len(problems) == pytest.approx(result["accuracy"])
    assert sum(len(row["ids"]) for row in rows) / len(rows) == pytest.approx(result["mean_length"])
    assert {row["right"] for row in rows} == {True, False}


def test_the_ratio_of_a_policy_with_itself_is_1(task, gpt):
    policy = gpt(0)
    data = viewer.collect(policy, gpt(0), task, task.held_out_problems(4), samples=2, max_new_tokens=9)
    for problem in data["problems"]:
        assert problem["before"] == problem["after"]
        assert {ratio for response in problem["after"] for ratio in response["ratio"]} == {1.0}


def test_one_right_response_of_four_has_advantage_one_and_a_half_and_each_of_its_tokens_has_it(writing):
    # Rewards 1, 0, 0, 0: mean 1/4, sample standard deviation 1/2, so (1 - 1/4) / 1/2 and (0 - 1/4) / 1/2.
    rows = writing(["yes", "no", "nay", "never"])["problems"][0]["before"]
    assert [row["scores"]["reward"] for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert [row["right"] for row in rows] == [True, False, False, False]
    assert rows[0]["advantage"] == pytest.approx([1.5] * 3, rel=1e-3)
    assert rows[3]["advantage"] == pytest.approx([-0.5] * 5, rel=1e-3)


def test_the_parts_that_the_task_describes_stand_beside_the_reward(writing):
    rows = writing(["yes", "no"])["problems"][0]["before"]
    assert [row["scores"] for row in rows] == [{"reward": 1.0, "length": 3.0}, {"reward": 0.0, "length": 2.0}]


@pytest.fixture
def two_gpts(tiny_gpt):
    """Policies of the reviews."""
    vocab_size = TASKS["reviews"].tokenizer.vocab_size
    return [tiny_gpt(seed, vocab_size=vocab_size, max_context=40, dtype=torch.float64) for seed in (0, 1)]


@pytest.mark.parametrize("learned", [True, False])
def test_where_nothing_is_verified_gold_and_proxy_have_their_names_and_nothing_is_right_or_has_an_advantage(
    two_gpts, learned
):
    task = TASKS["reviews"]()
    problems = task.held_out_problems(3)
    proxy = (lambda rollout: rollout.lengths / 8) if learned else None
    data = viewer.collect(*two_gpts, task, problems, samples=2, max_new_tokens=9, proxy=proxy)
    for problem in data["problems"]:
        assert problem.keys() == {"prompt", "before", "after"}  # no answer
        for response in problem["before"] + problem["after"]:
            assert response.keys().isdisjoint({"right", "advantage", "reward"})
            expected = {"gold": gold(problem["prompt"], "".join(response["texts"]))}
            expected |= {"proxy": len(response["ids"]) / 8} if learned else {}
            assert response["scores"] == expected
            assert len(response["logprob"]) == len(response["entropy"]) == len(response["ratio"]) > 0


def shown_in_a_run(folder, task, policies, problems, before: dict, after: dict) -> dict:
    checkpoint.save(folder / "checkpoint", 0, {"policy": policies[0]}, {})
    how = {"samples": 1, "max_new_tokens": 3}
    return read_back(viewer.write_run(folder, policies[1], task, problems, before, after, **how).read_text())


def test_prompts_that_come_again_are_shown_once_and_spread_over_all_of_them(two_gpts, tmp_path):
    task, evaluation = TASKS["reviews"](), {"gold": 1.0, "proxy": None}
    problems = task.held_out_problems(512)
    data = shown_in_a_run(tmp_path, task, two_gpts, problems, evaluation, {"gold": -2.0, "proxy": 3.0})
    assert data["result"] == "gold 1.000 → -2.000, proxy nan → 3.000 on 512 held-out problems"
    prompts = [problem["prompt"] for problem in data["problems"]]
    assert len(set(prompts)) == 16 and prompts == sorted(prompts, key=task.prompts[True].index)
    assert {prompt.split()[1] for prompt in prompts} == set(NOUNS)
    few = viewer.spread(problems[:5])
    assert few == problems[:5] == viewer.spread(few * 3)


def test_problems_that_are_all_different_are_shown_from_the_first_on(task, gpt, tmp_path):
    problems, evaluation = task.held_out_problems(40), {"accuracy": 0.5}
    data = shown_in_a_run(tmp_path, task, [gpt(0), gpt(1)], problems, evaluation, evaluation)
    assert [problem["prompt"] for problem in data["problems"]] == [problem.prompt for problem in problems[:16]]


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_run_without_the_weights_of_step_0_ends_well_and_says_that_it_leaves_no_page(
    fault, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"

    def lose_them(_):
        first = out / "checkpoint" / checkpoint.FIRST
        shutil.rmtree(first) if fault == "missing" else (first / "policy.safetensors").write_bytes(b"no")

    monkeypatch.setattr(report, "draw_curves", lose_them)  # behind the last step, before the page
    summary = train_grpo.main(train_grpo.Config(out=str(out), eval_problems=20, **TINY))
    assert json.loads((out / "summary.json").read_text()) == summary
    assert not (out / "samples.html").exists()
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("WARNING: samples.html, what changed token by token, is not written: ")
    assert checkpoint.FIRST in last


def test_tokens_outside_the_mask_have_no_numbers_and_change_none_of_the_others(writing, tiny_gpt):
    mask = torch.tensor([[True, True, False, False, True, True]])
    row = writing(["a<b>c!"], mask)["problems"][0]["before"][0]
    whole = writing(["a<b>c!"])["problems"][0]["before"][0]
    assert row["texts"] == ["a", "<", "b", ">", "c", "!"]
    assert row["mask"] == mask[0].tolist()
    for name in ("logprob", "entropy", "advantage", "ratio"):
        assert row[name] == [x if m else None for x, m in zip(whole[name], row["mask"], strict=True)], name


def test_a_response_of_no_tokens_is_shown_and_takes_no_part_in_the_advantages(writing, tmp_path):
    data = writing(["", "yes", "no"])
    empty, right, _ = read_back(written(tmp_path, data))["problems"][0]["before"]
    assert empty["ids"] == empty["texts"] == empty["logprob"] == empty["ratio"] == []
    assert right["advantage"] == pytest.approx([0.5 / 0.5**0.5] * 3, rel=1e-3)  # of the two that count
    assert all(row["ids"] == [] for row in writing(["", ""])["problems"][0]["before"])


def test_a_token_that_is_half_a_character_is_shown_as_its_bytes(writing):
    assert writing(["aé"])["problems"][0]["before"][0]["texts"] == ["a", "\\xc3", "\\xa9"]


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_a_response_says_it_stays_data(writing, tmp_path, text):
    data = writing([text], prompt=text, answer=text)
    data["problems"][0]["before"][0]["texts"] = [text]  # as one token too
    page = written(tmp_path, data, title=text, result=text)
    harmless = written(tmp_path, writing(["yes"]))
    assert Elements(page).elements == Elements(harmless).elements
    assert read_back(page) == data | {"title": text, "result": text}
    embedded = page.split('id="data">')[1].split("</script>")[0]
    assert "<" not in embedded and embedded.isascii() and embedded.isprintable()


def test_the_browser_may_run_this_script_alone_and_load_nothing(writing, tmp_path):
    elements = Elements(written(tmp_path, writing(["yes"])))
    policy = next(a["content"] for tag, a in elements.elements if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(maxsplit=1) for rule in policy.split(";"))
    (script,) = (text for attributes, text in elements.scripts if "type" not in attributes)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert set(rules) == {"default-src", "base-uri", "form-action", "script-src", "style-src"}


def test_the_page_refers_to_nothing_outside_itself(writing, tmp_path):
    page = written(tmp_path, writing(["yes"]))
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bhref=|innerHTML|fetch\(|XMLHttpRequest", page)
    assert {tag for tag, _ in Elements(page).elements}.isdisjoint({"link", "img", "iframe", "object", "base", "form"})


def test_numbers_that_are_not_finite_are_null(writing, tmp_path):
    assert [viewer.number(x) for x in (float("inf"), float("-inf"), float("nan"))] == [None] * 3
    assert [viewer.number(x) for x in (0.0, -1.234567, 1e-9)] == [0.0, -1.2346, 1e-9]


def test_the_state_before_training_is_kept_beside_the_newest_two_checkpoints(tmp_path):
    for step in (0, 5, 10, 15, 20):
        checkpoint.save(tmp_path, step, {}, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000", "step_000015", "step_000020"]
    assert checkpoint.FIRST == "step_000000"


def test_a_resumed_run_leaves_the_same_page_and_it_compares_with_the_weights_before_training(
    task, easier, tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "draw_curves", lambda out: None)  # takes longer than the run
    out = tmp_path / "run"
    train_grpo.main(train_grpo.Config(out=str(out), eval_problems=20, save_every=1, **TINY))
    page = (out / "samples.html").read_bytes()
    (out / "samples.html").unlink()
    train_grpo.main(parse(train_grpo.Config, None, ["--out", str(out), "--resume"]))
    assert (out / "samples.html").read_bytes() == page

    data, summary = read_back(page.decode()), json.loads((out / "summary.json").read_text())
    before, after = (f"{summary[when]['accuracy']:.3f}" for when in ("eval_before", "eval_after"))
    assert data["title"] == "run" and data["result"] == f"accuracy {before} → {after} on 20 held-out problems"
    assert len(data["problems"]) == 16

    policies = [GPT(GPTConfig(17, width=16, layers=1, heads=2, max_context=40)) for _ in range(2)]
    for policy, step in zip(policies, (0, 2), strict=True):
        checkpoint.load(out / "checkpoint" / f"step_{step:06d}", {"policy": policy})
    ratios = []
    for problem in data["problems"]:
        prompt = task.tokenizer.encode(problem["prompt"])
        assert len(problem["before"]) == len(problem["after"]) == 4
        for side, writer in zip(("before", "after"), policies, strict=True):
            for response in problem[side]:
                logprobs, old, new = (by_hand(m, prompt, response["ids"])[0] for m in (writer, *policies))
                assert response["logprob"] == pytest.approx(logprobs, rel=1e-3)  # float32
                assert response["ratio"] == pytest.approx(np.exp(np.subtract(new, old)).tolist(), rel=1e-3)
                ratios += response["ratio"]
    assert min(ratios) < 0.99 and max(ratios) > 1.01  # training changed something
