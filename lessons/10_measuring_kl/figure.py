"""Draws the figure of lesson 10 from fresh runs of kl_forms.py, and writes their table into README.md.

    python lessons/10_measuring_kl/figure.py

A few seconds on one core.
"""

from __future__ import annotations

from pathlib import Path

import kl_forms
import matplotlib.pyplot as plt
import torch
from kl_forms import BETA, FORMS, REFERENCE, WORLD
from torch import Tensor

from nanorl.kl import kl_estimate
from nanorl.plots import save

KINDS = {"k1": "tab:blue", "k2": "tab:green", "k3": "tab:red"}
DIRECTIONS = [0, *range(2, 9)]  # seeds; 1 is the reference's
STEPS = torch.logspace(-2, 0.3, 40, dtype=torch.float64).tolist()  # how far along a direction
DRAWN = {  # form -> color, line style: in both lower panels where it means something
    "no KL": ("0.55", "-"),
    "k1 in the loss": ("k", ":"),
    "k3 in the reward": ("tab:purple", "-"),
    "k3 of the response in the loss": ("tab:brown", "-"),
    "k3 a token in the loss": ("tab:red", "-"),
    "k2 a token in the loss": ("tab:orange", "-"),
    "k2 of the response in the loss": ("tab:green", "-"),
    "k1 in the reward": ("tab:blue", (0, (4, 3))),
}
COMMAND = "python lessons/10_measuring_kl/figure.py"


def values(logits: Tensor) -> dict[str, tuple[float, float]]:
    """Kind -> bias and standard deviation of its estimate from one response, each divided by the true KL."""
    probs, true = WORLD.probs(logits), WORLD.kl(logits, REFERENCE)
    logprobs, ref_logprobs = (WORLD.logprobs(z).sum(1) for z in (logits, REFERENCE))  # (27,)
    found = {}
    for kind in KINDS:
        estimates = kl_estimate(logprobs, ref_logprobs, kind)
        mean = (probs * estimates).sum()
        deviation = (probs * (estimates - mean) ** 2).sum().sqrt()
        found[kind] = ((mean / true - 1).item(), (deviation / true).item())
    return found


def pull(logits: Tensor, form: str) -> Tensor:
    """The expected gradient of that form's KL alone."""
    return (kl_forms.gradient(logits, form) - kl_forms.gradient(logits, "no KL")) / BETA


def true_pull(logits: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(WORLD.kl(logits, REFERENCE), logits)[0]


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def away(seed: int, step: float) -> Tensor:
    """The logits of a policy that far from the reference."""
    return REFERENCE + step * WORLD.random_logits(seed)


def draw(path: Path) -> None:
    figure, ((bias, noise), (gradients, way)) = plt.subplots(2, 2, figsize=(11.5, 8.2))
    for seed in DIRECTIONS:
        first = seed == DIRECTIONS[0]
        style = {"lw": 2.2 if first else 0.7, "alpha": 1 if first else 0.45}
        policies = [away(seed, step) for step in STEPS]
        kl = [WORLD.kl(policy, REFERENCE).item() for policy in policies]
        measured = [values(policy) for policy in policies]
        for kind, color in KINDS.items():
            for axes, which in ((bias, 0), (noise, 1)):
                line = [m[kind][which] for m in measured]
                axes.plot(kl, line, color=color, label=kind if first else None, **style)
        for form, (color, dashes) in DRAWN.items():
            if form not in ("no KL", "k1 in the loss"):  # they have no gradient to compare
                line = [cosine(pull(policy, form), true_pull(policy)) for policy in policies]
                gradients.plot(kl, line, color=color, ls=dashes, **style)
    bias.set(ylabel="bias / true KL", ylim=(-0.5, 0.5), title="k1 and k3 measure the KL without bias ...")
    noise.set(ylabel="standard deviation / true KL", yscale="log", title="... but k3 is precise only close by")
    gradients.set(
        ylabel="cosine with the true gradient", ylim=(-1.05, 1.1), title="In the loss k2 and k3 pull alike close by"
    )
    gradients.text(0.03, 0.04, "colors as on the right", transform=gradients.transAxes, fontsize=9)
    for axes in (bias, noise, gradients):
        axes.set(xscale="log", xlabel="KL(policy || reference) of a response (nats)")
    bias.legend(loc="upper left")
    noise.legend(loc="upper right")

    rows, ends = [], {}
    for form in FORMS:
        logits, distances = kl_forms.train(form)
        reward, kl, objective = kl_forms.summary(logits)
        rows.append(f"| {form} | {reward:.3f} | {kl:.3f} | {objective:.3f} | {distances[-1]:.3f} |")
        ends[form] = distances[-1]
        if form in DRAWN:
            color, dashes = DRAWN[form]
            way.plot(range(1, len(distances) + 1), distances, color=color, ls=dashes, lw=2, label=form)
    way.set(xscale="log", yscale="log", ylim=(1e-4, 1.3), xlabel="update (the first: 1)")
    way.set(ylabel="distance to the best policy", title="Two forms reach the best policy")
    way.legend(loc="lower left", fontsize=8)
    for axes in (bias, noise, gradients, way):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"k1 in the loss ends where no KL ends ({ends['k1 in the loss']:.2f} off), "
        f"k3 a token {ends['k3 a token in the loss']:.2f} off, k1 in the reward at the best policy"
    )
    caption = "All 27 responses listed, no sampling. Thick: one direction of moving away; thin: seven others."
    save(figure, path, f"{caption} Drawn by: {COMMAND}")
    write_results(path.with_name("README.md"), rows)
    print("\n".join(rows))
    for step in (0.1, 0.3, 1.0, 2.0):
        policy = away(DIRECTIONS[0], step)
        cosines = ", ".join(f"{form} {cosine(pull(policy, form), true_pull(policy)):.2f}" for form in list(DRAWN)[2:])
        print(f"KL {WORLD.kl(policy, REFERENCE):.4f}  bias, noise {values(policy)}\n    cosines {cosines}")


def write_results(page: Path, rows: list[str]) -> None:
    lines = ["| KL | reward | KL of a response | objective | off by |", "|" + "---|" * 5, *rows]
    before, begin, rest = page.read_text().partition("<!-- results -->\n")
    _, end, after = rest.partition("<!-- end of results -->")
    page.write_text(f"{before}{begin}" + "\n".join(lines) + f"\n{end}{after}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors of a few numbers
    draw(Path(__file__).with_name("kl_forms.png"))
