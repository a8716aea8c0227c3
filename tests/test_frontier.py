"""The frontier: best-of-n without bias, runs that share what they should, nothing run twice, numbers that agree."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from nanorl import frontier, processes
from nanorl.best_of_n import kl_of_best, mean_of_best
from nanorl.errors import Interrupted, RunError
from nanorl.frontier import Config, draw, finding, main, markdown, plan

# Of one evaluation by method and beta; a seed adds a hundredth.
GOLD = {("PPO", 0.05): 1.4, ("PPO", 0.0): -9.0, ("PPO", 0.2): 1.1, ("GRPO", 0.05): 1.0, ("GRPO", 0.2): 0.5}
GOLD |= {("DPO", 0.05): 0.9, ("DPO", 0.2): 1.2}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pretend(monkeypatch):
    """In place of the runs: what they would leave. Returns the names of those that were started, as they come."""
    started = []

    def start(job):
        started.append(job.out.name)
        job.out.mkdir(parents=True)
        (job.out / "checkpoint" / "step_000000").mkdir(parents=True)
        method, beta = job.label.split(", beta ")
        found = {"gold": GOLD[method, float(beta)] + 0.01 * job.seed, "proxy": 1.0, "kl": 3.0, "mean_length": 11.0}
        line = {"step": 0, "eval": found | {"gold": -0.5, "kl": 0.0}}
        (job.out / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (job.out / "summary.json").write_text(json.dumps({"steps": 100, "eval_after": found}))
        return processes.subprocess.Popen(["true"])

    def best_of_n(run, ns, pool):
        return [{"kl": kl_of_best(n), "gold": math.log(n), "proxy": 0.5, "mean_length": 10.0} for n in ns]

    monkeypatch.setattr(processes.Job, "start", start)
    monkeypatch.setattr(processes, "LOOK", 0.0)
    monkeypatch.setattr(frontier, "best_of_n", best_of_n)
    return started


TWO = Config(seeds=2, betas=(0.05, 0.2), out="here", processes=2)


# ---- best-of-n


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_best_of_n_is_the_mean_over_all_choices_of_n_from_the_pool(n):
    generator = torch.Generator().manual_seed(n)
    scores, values = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    expected = [
        sum(v[max(chosen, key=lambda i: s[i])] for chosen in itertools.combinations(range(7), n)) / math.comb(7, n)
        for s, v in zip(scores.tolist(), values.tolist(), strict=True)
    ]
    torch.testing.assert_close(mean_of_best(scores, values, n), torch.tensor(expected, dtype=torch.float64))


def test_best_of_1_is_the_mean_of_the_pool_and_best_of_all_its_best():
    scores, values = torch.tensor([0.3, 0.9, -1.0]), torch.tensor([5.0, 7.0, 9.0], dtype=torch.float64)
    assert mean_of_best(scores, values, 1).item() == pytest.approx(7.0)
    assert mean_of_best(scores, values, 3).item() == 7.0
    assert mean_of_best(scores, values, 2).item() == pytest.approx((7 + 7 + 5) / 3)


@pytest.mark.parametrize("n", [0, 8])
def test_more_than_the_pool_holds_cannot_be_chosen_from(n):
    with pytest.raises(ValueError, match="expected 1 <= n <= 7"):
        mean_of_best(torch.zeros(7), torch.zeros(7), n)


def exact_kl_of_best(probs: list[float], n: int) -> float:
    """Of responses in rising order of score: the best of n is at most number i with probability (sum up to i)^n."""
    below = [0.0, *itertools.accumulate(probs)]
    best = [high**n - low**n for low, high in itertools.pairwise(below)]
    return sum(q * math.log(q / p) for p, q in zip(probs, best, strict=True))


@pytest.mark.parametrize("n", [2, 4, 64])
def test_the_kl_of_best_of_n_is_a_bound_and_exact_where_no_response_comes_twice(n):
    few, many = exact_kl_of_best([0.2, 0.3, 0.4, 0.1], n), exact_kl_of_best([1e-5] * 100_000, n)
    assert few < kl_of_best(n) - 0.01
    assert many <= kl_of_best(n) and many == pytest.approx(kl_of_best(n), abs=1e-3)
    assert kl_of_best(1) == 0.0


# ---- what is run


def test_runs_of_a_seed_share_the_reward_model_of_that_seed_and_dpo_takes_the_pairs_alone():
    runs = plan(TWO)
    betas = {"PPO": (0.05, 0.2, 0.0), "DPO": (0.05, 0.2), "GRPO": (0.05, 0.2)}
    assert list(runs) == [(method, beta) for method in betas for beta in betas[method]]
    teachers = runs["PPO", 0.05]
    for (method, beta), jobs in runs.items():
        for seed, job in enumerate(jobs):
            assert (job.seed, job.script.name) == (seed, frontier.SCRIPTS[method])
            assert job.arguments[:2] == ("--beta", f"{beta:g}")
            learned = [x for x in job.arguments if x.startswith("rm:")]
            assert learned == ([] if method == "DPO" or job in teachers else [f"rm:{teachers[seed].out}"])
            assert ("reviews" in job.arguments) == (method == "GRPO")
    outs = [job.out for jobs in runs.values() for job in jobs]
    assert len(set(outs)) == 14 and {out.parent for out in outs} == {Path("here")}  # one folder of warm starts


def test_changed_code_of_the_reward_model_is_another_run_for_all_that_learn_from_it(tmp_path, monkeypatch):
    def names() -> dict:
        return {setting: jobs[0].out.name for setting, jobs in plan(TWO).items()}

    before = names()
    assert names() == before
    changed = tmp_path / "train_ppo.py"
    for script in frontier.SCRIPTS.values():
        (tmp_path / script).write_text(processes.SCRIPT.with_name(script).read_text())
    changed.write_text(changed.read_text() + "\nDECAY = 0.1\n")
    monkeypatch.setattr(frontier, "SCRIPT", tmp_path / "train_grpo.py")
    after = names()
    assert {method for method, beta in before if before[method, beta] != after[method, beta]} == {"PPO", "GRPO"}


def test_finished_runs_are_kept_and_missing_ones_made(pretend, capsys):
    first = main(TWO)
    assert len(pretend) == 14
    assert main(TWO) == first and len(pretend) == 14
    assert "14 of 14 runs are there already" in capsys.readouterr().out
    gone = Path("here") / pretend[5]
    (gone / "summary.json").rename(gone / "elsewhere")
    with pytest.raises(FileExistsError):  # from the pretended start, which makes the folder
        main(TWO)
    assert pretend[14:] == [gone.name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(betas=()), "different numbers from 1e-6"),
        (Config(betas=(0.1, 0.10000001)), "of at most six digits, got 0.1, 0.10000001"),
        (Config(betas=(float("nan"),)), "different numbers"),
        (Config(betas=(float("inf"),)), "different numbers"),
        (Config(betas=(1e-8,)), "different numbers"),
        (Config(betas=(0.0, 0.1)), "PPO with beta 0 is always run"),
        (Config(betas=(0.1, 0.1)), "different numbers"),
        (Config(seeds=0), "--seeds must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_an_error(config, message, pretend):
    with pytest.raises(RunError, match=message):
        main(config)
    assert not pretend


def test_a_quick_try_never_touches_the_results_of_the_whole():
    assert {Config(quick=quick).folder for quick in (False, True)} == {
        Path("runs/frontier"),
        Path("runs/frontier-quick"),
    }


def test_interrupted_it_says_how_to_go_on(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(frontier, "run_all", interrupt)
    with pytest.raises(Interrupted, match="the same command goes on"):
        main(TWO)


# ---- what is left to read


def test_numbers_table_and_picture_say_the_same(pretend, capsys):
    result = main(TWO)
    written = json.loads(Path("here/frontier.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert written["command"] == "python -m nanorl.frontier --seeds 2 --betas 0.05 0.2 --out here --processes 2"
    points = {(p["method"], p["setting"]): p for p in written["points"]}
    assert len(points) == 7 + len(frontier.NS)
    gold = points["PPO", "beta 0.05"]["gold"]
    assert gold["values"] == [1.4, 1.41] and gold["mean"] == pytest.approx(1.405)
    assert gold["half"] == pytest.approx(12.7062 * 0.01 / 2, abs=1e-5)  # t (1 degree) x std / sqrt(2)
    assert points["DPO", "beta 0.2"]["proxy"]["mean"] is None  # its implied reward is another scale
    assert points["best-of-n", "n = 64"]["kl"]["mean"] == pytest.approx(math.log(64) - 63 / 64, abs=1e-5)
    assert written["course"]["steps"] == [0, 100] and written["course"]["gold"]["mean"] == [-0.5, -8.995]
    text = Path("here/frontier.md").read_text()
    assert "| PPO       | beta 0.05 | 3.00 ± 0.00          | 1.4050 ± 0.0635 | 1.0000 ± 0.0000 | 11.0 ± 0.0 " in text
    assert text in capsys.readouterr().out
    assert Path("here/frontier.png").read_bytes().startswith(b"\x89PNG")


def test_the_title_names_the_best_setting_of_each_method_by_gold(pretend):
    points = main(TWO)["points"]
    assert finding(points) == (
        "Highest gold: PPO 1.41 at 3.0 nats, DPO 1.21 at 3.0 nats, GRPO 1.00 at 3.0 nats, best-of-n 4.16 at 3.2 nats"
    )


def test_a_single_seed_has_no_interval_and_is_drawn_all_the_same(pretend):
    one = Config(seeds=1, betas=(0.05,), out="here", processes=1)
    result = main(one)
    assert all(point["gold"]["half"] is None for point in result["points"])
    assert "| PPO       | beta 0.05 | 3.00                 | 1.4000" in markdown(result["points"])
    assert draw(result["points"], result["course"], Path("again.png"), "caption").exists()


# ---- the real thing


def test_the_quick_frontier_runs_whole_from_one_warm_start(tmp_path):
    result = main(Config(seeds=1, betas=(0.05,), quick=True, out="here", processes=1))
    assert len(list(Path("here/warm_starts").iterdir())) == 1  # --reward changes no seed's first policy
    points = {(p["method"], p["setting"]): p for p in result["points"]}
    best = [points["best-of-n", f"n = {n}"] for n in frontier.NS]
    proxies = [point["proxy"]["mean"] for point in best]
    assert proxies == sorted(proxies)  # more to choose from is never worse in the eyes of who chooses
    before = result["course"]["gold"]["mean"][0]
    # The same policy, 32 other samples: texts of a hardly trained model, each with several breaches at 2 points apiece
    assert best[0]["gold"]["mean"] == pytest.approx(before, abs=3.0)
    assert all(math.isfinite(point["gold"]["mean"]) for point in points.values())
    (teacher,) = result["runs"]["PPO, beta 0.05"]
    assert json.loads((Path("here") / teacher / "best_of_n_64.json").read_text())["found"][0]["kl"] == 0.0
