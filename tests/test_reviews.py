"""The world of the film reviews: its grammar and hidden score worked out by hand, its labels against Bradley-Terry."""

import math
import random
import re

import pytest

from nanorl.tasks import PREFERENCE_TASKS, TASKS
from nanorl.tasks.reviews import BAD, GOOD, LABELLERS, NOUNS, WORDS, Reviews, gold, review
from nanorl.tasks.task import Problem

PROMPT = " the plot was dull"
THREE_GOOD = " and the acting was {} great and the music was {} bold and the ending was {} funny ."


def said(text: str) -> str:
    """Without the blanks that an unfilled place leaves."""
    return "".join(f" {word}" for word in text.split())


BY_HAND = {  # behind " the plot was dull": what was said, and why it is worth that
    "nothing but an end": (" .", 0.0),
    "a good claim": (" but the acting was superb .", 1.0),
    "a bad claim": (" and the music was weak .", -1.0),
    "very adds nothing": (" but the acting was very superb .", 1.0),
    "good and bad cancel": (" but the acting was superb and the music was very weak .", 0.0),
    "three good claims": (said(THREE_GOOD.format("", "", "")), 3.0),
    "the prompt's noun again": (" and the plot was great .", -1.0),
    "a noun said twice": (" and the acting was great and the acting was bold .", 1.0 - 1.0),
    "a bad claim about a noun said twice costs no more": (
        " and the acting was great and the acting was weak .",
        1.0 - 1.0,
    ),
    "an adjective said twice": (" and the acting was great and the music was great .", 1.0 - 1.0),
    "the prompt's adjective again": (" and the acting was dull .", -1.0),
    "a noun and an adjective said before cost no more": (" and the plot was dull .", -1.0),
    "no end": (" but the acting was superb", 1.0 - 2.0),
    "an empty response": ("", -2.0),
    "cut off in a clause": (" but the acting was", -2.0),
    "a word left out makes no claim": (" but acting was superb .", -2.0),
    "a word said twice inside makes no claim": (" but the acting was was superb .", -2.0),
    "nothing may stand behind the end": (" but the acting was superb . .", 1.0 - 2.0),
    "going on behind the end": (" . and the acting was superb .", 1.0 - 2.0),
    "an end that is none": (" . the", -2.0 - 2.0),
    "no joining word": (" the acting was superb .", 1.0 - 2.0),
    "an adjective that belongs to nothing": (" very superb .", -2.0),
    "two joining words": (" and but the acting was superb .", 1.0 - 2.0),
    "only nouns and praise": (" ending great ending great .", -4 * 2.0),
    "18 words are read gladly": (said(THREE_GOOD.format("very", "very", "")), 3.0),
    "the 19th word is rambling": (said(THREE_GOOD.format("very", "very", "very")), 3.0 - 0.5),
    "21 words": (said(THREE_GOOD.format("", "", ""))[:-2] + " and the camera was moving .", 4.0 - 3 * 0.5),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_hidden_score_is_that_worked_out_by_hand(name):
    response, expected = BY_HAND[name]
    assert gold(PROMPT, response) == pytest.approx(expected, abs=1e-12)
    assert Reviews().reward(Problem(PROMPT, ""), response) == gold(PROMPT, response)


CLAUSE = rf" the ({'|'.join(NOUNS)}) was(?: very)? ({'|'.join(GOOD + BAD)})"
WHOLE = re.compile(rf"{CLAUSE}(?: (?:and|but){CLAUSE})* \.")


def slipped(text: str, rng: random.Random) -> str:
    """A word is left out, said twice or put in from elsewhere."""
    words = text.split()
    at = rng.randrange(len(words))
    words[at : at + 1] = rng.choice([[], [words[at]] * 2, [words[at], rng.choice(WORDS)]])
    return "".join(f" {word}" for word in words)


def test_demonstrations_are_in_the_grammar():
    assert all(WHOLE.fullmatch(p.prompt + p.answer) for p in Reviews().training_problems(300, "grammar"))


def test_a_review_in_the_grammar_is_worth_its_claims_and_any_other_one_loses_two_points_for_each_slip():
    """Against a second reader: a regular expression over words, and the claims taken apart at the joining words."""
    rng = random.Random(3)
    whole = slips = 0
    for _ in range(1500):
        prompt, response = Reviews().prompts[False][rng.randrange(100)], review(rng)
        response = slipped(response, rng) if rng.random() < 0.2 else response
        claims = re.findall(CLAUSE, prompt + response)
        seen, expected = {*claims[0]}, 0
        for noun, adjective in claims[1:]:
            expected += -1 if noun in seen or adjective in seen else 1 if adjective in GOOD else -1
            seen |= {noun, adjective}
        expected -= 0.5 * max(0, len(response.split()) - 18)
        lost = expected - gold(prompt, response)
        if WHOLE.fullmatch(prompt + response):
            assert lost == pytest.approx(0, abs=1e-12)
            whole += 1
        else:
            assert lost / 2 == pytest.approx(round(lost / 2), abs=1e-9) and round(lost / 2) >= 1
            slips += 1
    assert 0.1 < slips / 1500 < 0.2  # a slip may leave a review whole: a "very" left out, say


# ---- problems and demonstrations


def test_problems_and_demonstrations_are_functions_of_their_key():
    first, again = Reviews(), Reviews()
    random.seed(1)
    problems = first.training_problems(50, "ppo 0 3")
    random.seed(2)
    assert again.training_problems(50, "ppo 0 3") == problems
    assert again.training_problems(50, "ppo 0 4") != problems
    state = random.getstate()
    shown = [first.demonstration(problem, "sft 0 1") for problem in problems]
    assert shown == [again.demonstration(problem, "another") for problem in problems]
    assert random.getstate() == state  # nobody else's random numbers are used up
    assert len(set(shown)) > 30


def test_held_out_prompts_are_never_training_prompts_and_together_they_are_all():
    task = Reviews()
    held_out = {problem.prompt for problem in task.held_out_problems(1000)}
    trained_on = {problem.prompt for key in range(60) for problem in task.training_problems(200, f"key {key}")}
    assert not held_out & trained_on
    every = {f" the {n} was{v} {a}" for n in NOUNS for v in ("", " very") for a in GOOD + BAD}
    assert held_out | trained_on == every and len(every) == 576
    assert len(held_out) == pytest.approx(576 / 8, abs=12)


def test_the_held_out_problems_are_the_same_in_every_run():
    problems = Reviews().held_out_problems(40)
    random.seed(5)
    assert Reviews().held_out_problems(60)[:40] == problems


def test_every_prompt_and_demonstration_fits_and_is_made_of_known_words():
    task = Reviews()
    for problem in task.training_problems(2000, "fit") + task.held_out_problems(200):
        prompt, response = task.tokenizer.encode_prompt(problem.prompt), task.tokenizer.encode_response(problem.answer)
        assert len(prompt) <= task.max_prompt_tokens and len(response) <= task.max_new_tokens
        assert task.tokenizer.decode(prompt) == problem.prompt
        assert task.tokenizer.decode(response) == problem.answer + "<eos>"
    assert task.tokenizer.vocab_size == len(WORDS) + 1
    assert task.describe(problem, problem.answer) == {}


def test_the_reviews_are_a_task_and_one_whose_responses_people_compare():
    assert TASKS["reviews"] is PREFERENCE_TASKS["reviews"] is Reviews
    assert set(Reviews.labellers) == {"gold", "length"}


# ---- labels


def share_preferred(a: str, b: str, labeller: str, n: int = 1000) -> float:
    problem = Problem(PROMPT, "")
    return sum(Reviews().prefers(problem, a, b, f"{i}", labeller) for i in range(n)) / n


GOOD_ONE, LONGER_GOOD_ONE = " but the acting was superb .", " but the acting was very superb ."
FREQUENCIES = [  # labeller, two responses, sigmoid(2 x difference) worked out
    ("gold", GOOD_ONE, " .", 0.880797),  # difference 1
    ("gold", " .", GOOD_ONE, 0.119203),
    ("gold", BY_HAND["21 words"][0], BY_HAND["18 words are read gladly"][0], 0.268941),  # -1/2
    ("gold", BY_HAND["18 words are read gladly"][0], BY_HAND["the 19th word is rambling"][0], 0.731059),  # 1/2
    ("length", LONGER_GOOD_ONE, GOOD_ONE, 0.622459),  # equally good, one word longer: 1/4
    ("length", GOOD_ONE, LONGER_GOOD_ONE, 0.377541),
    ("length", GOOD_ONE, " .", 0.989013),  # 1 + 5/4
]


@pytest.mark.parametrize(("labeller", "a", "b", "expected"), FREQUENCIES)
def test_the_better_one_is_preferred_as_often_as_bradley_and_terry_say(labeller, a, b, expected):
    deviation = math.sqrt(expected * (1 - expected) / 1000)
    assert share_preferred(a, b, labeller) == pytest.approx(expected, abs=4 * deviation)


def test_a_label_is_a_function_of_its_arguments():
    task, problem = Reviews(), Problem(PROMPT, "")
    a, b = BY_HAND["21 words"][0], BY_HAND["18 words are read gladly"][0]
    random.seed(1)
    labels = [task.prefers(problem, a, b, f"{i}") for i in range(100)]
    random.seed(2)
    state = random.getstate()
    assert [Reviews().prefers(problem, a, b, f"{i}") for i in range(100)] == labels
    assert random.getstate() == state and len(set(labels)) == 2
    # Asked the other way round the person says the same but for the draws: not one label for both orders.
    assert [Reviews().prefers(problem, b, a, f"{i}") for i in range(100)] != labels


def test_two_equally_good_ones_cannot_be_told_apart_but_by_who_loves_length():
    task, problem = Reviews(), Problem(PROMPT, "")
    assert gold(PROMPT, GOOD_ONE) == gold(PROMPT, LONGER_GOOD_ONE)
    assert [task.prefers(problem, GOOD_ONE, LONGER_GOOD_ONE, f"{i}") for i in range(20)] == [None] * 20
    assert share_preferred(LONGER_GOOD_ONE, GOOD_ONE, "length") > 0.6
    same_length = " but the music was clever ."
    assert task.prefers(problem, GOOD_ONE, same_length, "0", "length") is None
    assert LABELLERS == {"gold": 0.0, "length": 0.25}


def test_a_response_however_bad_can_be_compared():
    """A thousand words out of place: the difference is far outside what exp can take."""
    task, problem = Reviews(), Problem(PROMPT, "")
    terrible = " the" * 1000
    assert gold(PROMPT, terrible) < -600
    assert task.prefers(problem, GOOD_ONE, terrible, "0") is True
    assert task.prefers(problem, terrible, GOOD_ONE, "0") is False
