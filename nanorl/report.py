"""What a finished run leaves and says, and the warning that a reward is being gamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanorl import viewer
from nanorl.errors import RunError
from nanorl.evaluation import describe_evaluation
from nanorl.model import GPT
from nanorl.plots import draw_curves
from nanorl.run import Run
from nanorl.tasks.task import Problem, Task


def conclude(
    run: Run, policy: GPT, task: Task, problems: Sequence[Problem], examine: Callable[[int], dict], **how
) -> dict:
    """Evaluate once more with `examine(steps)`, write summary.json, curves.png and samples.html (`how` goes to
    `viewer.collect`), say what changed. Returns the summary."""
    run.stop_if_interrupted(f"saved at step {run.config.steps} of {run.config.steps}")
    with run.phase("eval"):
        eval_after = examine(run.config.steps)
    summary = run.finish(eval_after=eval_after)
    draw_curves(run.out)
    before, after = summary["eval_before"], summary["eval_after"]
    run.say(describe_evaluation(before, after))
    run.say(f"curves, samples, weights: {run.out}")
    try:
        page = viewer.write_run(run.out, policy, task, problems, before, after, **how)
        run.say(f"what changed, token by token: {page}")
    except RunError as error:  # the weights before training cannot be read; all else is there
        run.say(f"WARNING: samples.html, what changed token by token, is not written: {error}")
    return summary


def warn_if_over_optimized(run: Run, step: int, now: dict) -> None:
    """Warns when what is wanted falls while what is trained on rises: the reward model is being fooled (Gao et al.
    2023). The best evaluation so far, by gold, is kept in summary.json."""
    best = run.results.get("best")
    if best is None or now["gold"] > best["gold"]:
        run.results["best"] = {"step": step, "gold": now["gold"], "gold_low": now["gold_low"], "proxy": now["proxy"]}
    elif now["gold_high"] < best["gold_low"] and now["proxy"] > best["proxy"]:
        run.results["over_optimized"] = True
        run.say(
            f"WARNING: over-optimization: held-out gold {now['gold']:.2f} is below the {best['gold']:.2f} of step "
            f"{best['step']}, while the proxy rose from {best['proxy']:.2f} to {now['proxy']:.2f}. The policy has "
            "learned to please the reward model: raise --beta, stop earlier, look at samples.txt"
        )
