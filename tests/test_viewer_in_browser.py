"""samples.html as a reader meets it: headless Chromium opens the page of a small run and every number is looked up in
the rollouts, sampled and scored again from the run's weights. Needs selenium, Chromium and its driver."""

import math
import re
import shutil

import pytest
import torch

import train_grpo
from nanorl import checkpoint, report, viewer
from nanorl.evaluation import EVAL_SEED
from nanorl.model import GPT, GPTConfig
from nanorl.rollout import Rollout
from nanorl.sampler import Sampler
from nanorl.scorer import score
from nanorl.tasks import TASKS
from nanorl.tasks.task import Problem
from nanorl.tokenizer import Tokenizer

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install -e '.[browser]')")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium or no chromedriver on the PATH")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TINTS = {"logprob": "log-prob", "entropy": "entropy", "advantage": "advantage", "ratio": "ratio"}
PAPER = {"light": (255, 255, 255), "dark": (29, 32, 36)}
ENDS = {
    "light": {"single": (166, 138, 214), "above": (95, 163, 221), "below": (232, 146, 58)},
    "dark": {"single": (107, 80, 168), "above": (31, 108, 173), "below": (163, 86, 15)},
}
READABLE = 4.5  # contrast of text with what is behind it, WCAG 2 level AA


def easy_reward(task, problem: Problem, response: str) -> float:
    """A model without any skill earns it now and then: the right digit among the first three characters."""
    return float(problem.answer in response[:3])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps."""
    out = tmp_path_factory.mktemp("runs") / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TASKS["chain"], "reward", easy_reward)
        patch.setattr(report, "draw_curves", lambda out: None)
        small = {"size": (16, 1, 2), "prompts": 4, "learning_rate": 0.03}
        train_grpo.main(train_grpo.Config(out=str(out), steps=8, warm_start_steps=20, eval_problems=20, **small))
        yield out


@pytest.fixture(scope="module")
def rollouts(run):
    """What both policies say to the first 16 held-out problems, with all numbers of each token."""
    task = TASKS["chain"]()
    problems = task.held_out_problems(20)[:16]
    policies = {}
    for side, step in (("before", 0), ("after", 8)):
        policies[side] = GPT(GPTConfig(task.tokenizer.vocab_size, width=16, layers=1, heads=2, max_context=40))
        checkpoint.load(run / "checkpoint" / f"step_{step:06d}", {"policy": policies[side]})
    found = {}
    for side, policy in policies.items():
        rollout = Sampler(policy).generate(
            [task.tokenizer.encode(problem.prompt) for problem in problems],
            max_new_tokens=task.max_new_tokens,
            stop_ids=[task.tokenizer.eos_id],
            samples_per_prompt=4,
            seed=EVAL_SEED,
        )
        with torch.no_grad():
            scored = {name: score(p, rollout) for name, p in policies.items()}
        texts = rollout.texts(task.tokenizer)
        rollout.rewards = torch.tensor([easy_reward(task, problems[i // 4], text) for i, text in enumerate(texts)])
        in_groups = rollout.rewards.view(-1, 4)
        centred = in_groups - in_groups.mean(1, keepdim=True)
        numbers = {
            "logprob": rollout.behavior_logprobs,
            "entropy": scored[side][1],
            "advantage": (centred / (in_groups.std(1, keepdim=True) + 1e-4)).view(-1, 1).expand_as(rollout.tokens),
            "ratio": (scored["after"][0] - scored["before"][0]).exp(),
        }
        found[side] = (rollout, numbers)
    return found


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


class Page:
    def __init__(self, driver):
        self.driver = driver

    def open(self, path, scheme="light", width=1360):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.get(path.as_uri())

    def js(self, code, *arguments):
        return self.driver.execute_script("return " + code, *arguments)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def press(self, *keys):
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def switch(self, name, value):
        self.one(f"#{name} input[value={value}]").click()

    def text(self, selector):
        return self.one(selector).text

    def tokens(self, inside):
        """Each token's text, the value shown, background, color, and where it stands: (response's heading, ...)."""
        return self.js(
            """[...document.querySelectorAll(arguments[0])].map((element) => {
              const style = getComputedStyle(element);
              return { text: element.textContent, shown: element.dataset.shown, background: style.backgroundColor,
                color: style.color, image: style.backgroundImage, classes: element.className };
            })""",
            inside,
        )

    def focused(self):
        return self.driver.switch_to.active_element


@pytest.fixture
def page(chromium, run):
    chromium.get_log("browser")  # of the test before
    page = Page(chromium)
    page.open(run / "samples.html")
    yield page
    assert [entry["message"] for entry in chromium.get_log("browser")] == []  # no test makes the console complain


def rgb(css: str) -> tuple[float, ...]:
    """Of `rgb(1, 2, 3)` and of `color(srgb 0.1 0.2 0.3)`, in 0 to 255."""
    numbers = tuple(float(x) for x in re.findall(r"[\d.e-]+", css.replace("srgb", ""))[:3])
    return tuple(255 * x for x in numbers) if css.startswith("color(") else numbers


def luminance(color: tuple[float, ...]) -> float:
    """Relative luminance of WCAG 2."""
    linear = [x / 12.92 if (x := c / 255) <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(rgb(a)), luminance(rgb(b))))
    return (light + 0.05) / (dark + 0.05)


def expected_color(tint: str, value: float, scheme: str) -> tuple[float, ...]:
    """Where the value lies on its scale, worked out again."""
    share = {
        "logprob": lambda x: -x / 5,
        "entropy": lambda x: x / 2.5,
        "advantage": lambda x: x / 2,
        "ratio": lambda x: math.log2(x) / 4,  # 1/16 to 16
    }[tint](value)
    end = "single" if tint in ("logprob", "entropy") else "below" if share < 0 else "above"
    share = min(1.0, abs(share))
    return tuple(p + share * (e - p) for p, e in zip(PAPER[scheme], ENDS[scheme][end], strict=True))


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("tint", TINTS)
def test_each_switch_shows_every_tokens_number_and_color_from_the_rollouts(page, run, rollouts, tint, scheme):
    page.open(run / "samples.html", scheme)
    seen = []
    for problem in (0, 1, 2):
        page.switch("tint", tint)  # clicked anew: the last prompt left it where it was
        for side, (rollout, numbers) in rollouts.items():
            rows = range(4 * problem, 4 * problem + 4)
            values = [v for row in rows for v in numbers[tint][row, : rollout.lengths[row]].tolist()]
            texts = [t for row in rows for t in rollout.tokens[row, : rollout.lengths[row]].tolist()]
            shown = page.tokens(f"#{side} .token")
            assert [t["text"] for t in shown] == ["0123456789+-*=<>\N{BLACK SQUARE}"[i] for i in texts]
            for token, value in zip(shown, values, strict=True):
                name, _, digits = token["shown"].rpartition(" ")
                assert name == TINTS[tint]
                assert number(digits) == pytest.approx(value, rel=6e-3, abs=2e-6)  # three digits
                assert rgb(token["background"]) == pytest.approx(expected_color(tint, value, scheme), abs=0.5)
            seen += values
        page.press("n")
    assert min(seen) < max(seen)
    if tint in ("advantage", "ratio"):
        middle = {"advantage": 0, "ratio": 1}[tint]
        assert min(seen) < middle < max(seen)  # both ends of the scale were there to be looked at


def test_the_number_appears_at_the_token_under_the_pointer_and_all_of_them_in_the_line_below(page, rollouts):
    token = page.all("#after .token")[1]
    assert page.js("getComputedStyle(arguments[0], '::after').content", token) == "none"
    webdriver.ActionChains(page.driver).move_to_element(token).perform()
    shown = token.get_attribute("data-shown")
    assert page.js("getComputedStyle(arguments[0], '::after').content", token) == "attr(data-shown)" or (
        page.js("getComputedStyle(arguments[0], '::after').content", token) == f'"{shown}"'
    )
    _, numbers = rollouts["after"]
    line = page.text("#detail")
    assert "after, response 1, token 2 of" in line
    for tint, name in TINTS.items():
        found = number(re.search(rf"{name} (\S+)", line)[1])
        assert found == pytest.approx(numbers[tint][0, 1].item(), rel=6e-3, abs=2e-6)
    probability = number(re.search(r"probability (\S+)\)", line)[1])
    assert probability == pytest.approx(math.exp(numbers["logprob"][0, 1].item()), rel=6e-3)


def test_reward_parts_and_the_right_answer_stand_beside_each_response(page, rollouts):
    problem = TASKS["chain"]().held_out_problems(1)[0]
    assert page.text("#prompt") == problem.prompt
    for side, (rollout, _) in rollouts.items():
        facts = [element.text.split("\n") for element in page.all(f"#{side} .facts")]
        assert len(facts) == 4
        for row, words in enumerate(facts):
            line = " ".join(words)
            right = rollout.rewards[row] == 1
            assert ("✓ right" in line, "✗ wrong" in line) == (right, not right)
            assert f"reward {int(right)}" in line
            assert f"thinks {int(rollout.tokens[row, 0] == 14)}" in line  # "<"
            assert f"right answer {problem.answer}" in line
            assert f"{rollout.lengths[row]} tokens" in line
            assert ("cut off" in line) == (rollout.finish[row] == "length")


def test_the_legend_bears_the_numbers_of_its_colors(page):
    for tint, ticks in {
        "logprob": [0, -1, -2, -3, -4, -5],
        "entropy": [0, 0.5, 1, 1.5, 2, 2.5],
        "advantage": [-2, -1, 0, 1, 2],
        "ratio": [1 / 16, 1 / 4, 1, 4, 16],
    }.items():
        page.switch("tint", tint)
        legend = page.tokens("#ticks .token")
        values = [t["text"].lstrip("≤≥ ") for t in legend]
        assert [1 / number(v[2:]) if v.startswith("1/") else number(v) for v in values] == ticks
        for token, value in zip(legend, ticks, strict=True):
            assert rgb(token["background"]) == pytest.approx(expected_color(tint, value, "light"), abs=0.5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_tint(page, run, tmp_path, scheme):
    page.open(run / "samples.html", scheme)
    for key in "1234":
        page.press(key)
        for token in page.tokens(".token"):  # those of the legend hold both ends of each scale
            assert contrast(token["color"], token["background"]) >= READABLE
    back = page.js("getComputedStyle(document.body).backgroundColor")
    for selector in ("body", "#meaning", "kbd", ".right", ".wrong", "#place", "#detail", "h3 span"):
        color = page.js("getComputedStyle(document.querySelector(arguments[0])).color", selector)
        assert contrast(color, back) >= READABLE, selector
    page.open(by_bytes(tmp_path, ["ab"], torch.tensor([[True, False]])), scheme)
    outside = page.tokens(".token.outside")[0]
    stripes = re.findall(r"rgb\([^)]*\)", outside["image"])
    assert len(stripes) >= 2
    assert min(contrast(outside["color"], behind) for behind in [*stripes, outside["background"]]) >= READABLE


def test_dark_follows_the_system_while_the_page_is_open(page):
    assert luminance(rgb(page.js("getComputedStyle(document.body).backgroundColor"))) > 0.8
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    assert luminance(rgb(page.js("getComputedStyle(document.body).backgroundColor"))) < 0.05


def test_the_filters_show_the_right_or_the_wrong_responses_alone(page, rollouts):
    rewards = {side: rollout.rewards.view(-1, 4) for side, (rollout, _) in rollouts.items()}
    for name, wanted in (("right", 1), ("wrong", 0), ("all", None)):
        page.switch("filter", name)
        fits = {side: torch.full((16, 4), True) if wanted is None else r == wanted for side, r in rewards.items()}
        prompts = (fits["before"].any(1) | fits["after"].any(1)).nonzero().flatten().tolist()
        enabled = [i for i, button in enumerate(page.all("#overview button")) if button.is_enabled()]
        assert enabled == prompts
        visited = []
        for _ in prompts:
            place, marks = page.js(
                """[document.querySelector("#place").textContent, ["before", "after"].map((side) =>
                  [...document.querySelectorAll(`#${side} .facts > :first-child`)].map((e) => e.textContent))]"""
            )
            at = int(re.search(r"prompt (\d+) of 16", place)[1]) - 1
            visited.append(at)
            for side, shown in zip(fits, marks, strict=True):
                kept = rewards[side][at][fits[side][at]]
                assert shown == ["✓ right" if reward == 1 else "✗ wrong" for reward in kept]
            page.press("n")
        assert sorted(visited) == prompts  # "n" goes through those prompts and no others
        assert name != "right" or len(prompts) < 16  # some prompts have been left out


def test_all_of_it_works_by_keyboard(page):
    for key, tint in zip("1234", TINTS, strict=True):
        page.press(key)
        assert page.one(f"#tint input[value={tint}]").is_selected()
        assert page.all("#after .token")[0].get_attribute("data-shown").startswith(TINTS[tint])
    for key, name in zip("rwa", ("right", "wrong", "all"), strict=True):
        page.press(key)
        assert page.one(f"#filter input[value={name}]").is_selected()
    start = page.text("#place")
    page.press("n", "n", "p", "p", "p")
    assert page.text("#place") == "prompt 16 of 16"  # round the end
    page.press("n")
    assert page.text("#place") == start

    reached = []
    page.js("document.activeElement.blur()")
    while True:
        page.press(Keys.TAB)
        element = page.focused()
        if element.tag_name == "body" or element in reached:
            break
        assert page.js("getComputedStyle(arguments[0]).outlineStyle", element) == "solid"  # one sees where one is
        reached.append(element)
    for selector, count in {
        "input:checked": 2,
        "#overview button": 16,
        "#problem button": 2,
        "article .token:first-child": 8,
    }.items():
        assert len(page.all(selector)) == count
        assert all(element in reached for element in page.all(selector)), selector

    line = max(page.all("article"), key=lambda article: len(article.find_elements(By.CSS_SELECTOR, ".token")))
    tokens = line.find_elements(By.CSS_SELECTOR, ".token")
    page.js("arguments[0].focus()", tokens[0])
    for token in tokens[1:]:
        page.press(Keys.ARROW_RIGHT)
        assert page.focused() == token
        assert page.js("getComputedStyle(arguments[0]).outlineStyle", token) == "solid"
    assert f"token {len(tokens)} of {len(tokens)}" in page.text("#detail")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert page.focused() == tokens[-2]
    page.press("n")
    assert "token" in page.focused().get_attribute("class")  # the next prompt's: one goes on reading
    page.press(Keys.TAB)
    assert "token" in page.focused().get_attribute("class")


def test_a_click_on_a_prompt_and_the_buttons_lead_to_it(page):
    page.all("#overview button")[4].click()
    assert page.text("#place") == "prompt 5 of 16"
    page.one("#next").click()
    page.one("#next").click()
    page.one("#previous").click()
    assert page.text("#place") == "prompt 6 of 16"
    current = [button.get_attribute("aria-current") for button in page.all("#overview button")]
    assert current == ["true" if i == 5 else "false" for i in range(16)]


def test_where_nothing_is_verified_the_page_shows_gold_and_proxy_and_offers_neither_filter_nor_advantage(
    page, tmp_path
):
    task, proxy = TASKS["reviews"](), lambda rollout: rollout.lengths / 8
    shape = GPTConfig(task.tokenizer.vocab_size, width=16, layers=1, heads=2, max_context=40)
    problems = viewer.spread(task.held_out_problems(100))
    data = viewer.collect(GPT(shape), GPT(shape), task, problems, samples=3, max_new_tokens=9, proxy=proxy)
    viewer.write(tmp_path / "samples.html", data, title="ppo-1", result="")
    page.open(tmp_path / "samples.html")
    assert page.all("#filter") == page.all(".right") == page.all(".wrong") == page.all(".answer") == []
    assert [element.get_attribute("value") for element in page.all("#tint input")] == ["logprob", "entropy", "ratio"]
    page.press("3", "w", "r")  # the last two do nothing
    assert page.all("#after .token")[0].get_attribute("data-shown").startswith("ratio ")
    for side in ("before", "after"):
        scores = [response["scores"] for response in data["problems"][0][side]]
        facts = [
            number(x)
            for x in re.findall(r"(?:gold|proxy) (\S+)", " ".join(e.text for e in page.all(f"#{side} .facts")))
        ]
        assert facts == pytest.approx([x for row in scores for x in (row["gold"], row["proxy"])], rel=6e-3)
        means = re.fullmatch(r"mean gold (\S+), mean proxy (\S+)", page.text(f"#{side} h3 span")).groups()
        expected = [sum(row[name] for row in scores) / 3 for name in ("gold", "proxy")]
        assert [number(mean) for mean in means] == pytest.approx(expected, rel=6e-3)
    for button, problem in zip(page.all("#overview button"), data["problems"], strict=True):
        golds = [sum(r["scores"]["gold"] for r in problem[side]) / 3 for side in ("before", "after")]
        *prompt, before, after = button.text.split("\n")
        assert " ".join(prompt) == problem["prompt"].strip()
        assert [number(before), number(after)] == pytest.approx(golds, rel=6e-3)
    # All of each prompt can be read there: where it takes more than one line too.
    assert page.js("[...document.querySelectorAll('#overview .code')].every((e) => e.scrollHeight <= e.clientHeight)")


class Writing:
    tokenizer = Tokenizer.bytes()

    def reward(self, problem, response):
        return 0.0

    def describe(self, problem, response):
        return {}


def by_bytes(folder, texts, mask=None):
    """The page of given responses in bytes, all to one prompt."""
    tokenizer, model = Writing.tokenizer, GPT(GPTConfig(257, width=8, layers=1, heads=2, max_context=200))
    rollout = Rollout.from_responses([tokenizer.encode("?")] * len(texts), [tokenizer.encode(t) for t in texts])
    rollout.mask = rollout.mask if mask is None else rollout.mask & mask
    rollout.groups.zero_()
    rows = viewer.responses(rollout, model, model, model, Writing(), [Problem("?", texts[0])])
    for row, text in zip(rows, texts, strict=True):
        row["texts"] = [text, *row["texts"][1:]] if row["ids"] else []  # as one token too
    problem = {"prompt": texts[0], "answer": texts[0], "before": rows, "after": rows}
    viewer.write(folder / "samples.html", {"problems": [problem], "vocabulary": 257}, title=texts[0], result=texts[0])
    return folder / "samples.html"


def test_what_a_model_writes_is_shown_and_never_run(page, tmp_path):
    hostile = (
        "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\"> &amp; \x07"
    )
    page.open(by_bytes(tmp_path, [hostile]))
    shown = hostile.replace("\x07", "\\x07")
    assert page.tokens("#after .token")[0]["text"] == shown
    assert page.js("document.getElementById('prompt').textContent") == shown
    assert page.js("document.getElementById('title').textContent") == hostile
    assert shown in page.js("document.querySelector('.answer').textContent")
    assert page.js("document.title").startswith("</script>")
    assert page.all("img") == [] and len(page.all("script")) == 2


def test_masked_tokens_are_hatched_and_say_why_they_have_no_number(page, tmp_path):
    page.open(by_bytes(tmp_path, ["abcd", ""], torch.tensor([[True, False, False, True]])))
    for key in "1234":
        page.press(key)
        shown = page.tokens("#before .token")
        assert ["outside" in t["classes"] for t in shown] == [False, True, True, False]
        assert ["gradient" in t["image"] for t in shown] == [False, True, True, False]
        assert [t["shown"] == "outside the mask" for t in shown] == [False, True, True, False]
    webdriver.ActionChains(page.driver).move_to_element(page.all("#before .token")[1]).perform()
    assert "outside the mask" in page.text("#detail") and "log-prob" not in page.text("#detail")
    assert len(page.all("#before article")) == 2  # the response of no tokens is there too
    assert "0 tokens" in page.all("#before .facts")[1].text


def test_the_stop_token_has_a_form_of_its_own(page, rollouts):
    rollout, _ = rollouts["before"]
    prompt = rollout.finish.index("stop") // 4
    page.all("#overview button")[prompt].click()
    stops = [t for t in page.tokens("#before .token") if "stop" in t["classes"]]
    assert len(stops) == rollout.finish[4 * prompt : 4 * prompt + 4].count("stop") > 0
    assert {t["text"] for t in stops} == {"\N{BLACK SQUARE}"}
    webdriver.ActionChains(page.driver).move_to_element(page.all("#before .token.stop")[0]).perform()
    assert "stop token" in page.text("#detail")


@pytest.mark.parametrize("width", [360, 480, 1000])
def test_on_a_narrow_screen_the_lists_stand_below_each_other_and_nothing_sticks_out(page, run, width):
    page.open(run / "samples.html", width=width)
    before, after = page.one("#before").rect, page.one("#after").rect
    assert after["y"] >= before["y"] + before["height"]
    assert page.js("document.documentElement.scrollWidth") <= width
    page.open(run / "samples.html", width=1360)
    before, after = page.one("#before").rect, page.one("#after").rect
    assert after["y"] == before["y"] and after["x"] >= before["x"] + before["width"]


def test_the_page_loads_nothing_and_could_not_if_it_tried(page):
    assert page.js("performance.getEntriesByType('resource').length") == 0
    refused = page.driver.execute_async_script(
        """
        const done = arguments[0], refused = [];
        document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
        const script = document.body.appendChild(document.createElement("script"));
        script.textContent = "document.title = 'run'";
        document.body.appendChild(document.createElement("img")).src = "https://example.invalid/x.png";
        fetch("https://example.invalid/").catch(() => setTimeout(() => done(refused), 100));
        """
    )
    assert {"connect-src", "img-src"} <= set(refused) and any(kind.startswith("script-src") for kind in refused)
    assert page.js("document.title") == "small: samples"
    page.driver.get_log("browser")  # its complaints were asked for
