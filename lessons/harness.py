"""Checks a lesson's answers: each blank passes, or fails with a hint. Exit status 1 if any fails.

A check is a function whose parameters are the names of the blanks it examines and whose docstring is its hint. It
calls `require` and `require_close` and returns nothing. A lesson's checks.py lists them; exercise.py and solution.py
both run them.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

TOLERANCE = 1e-9  # all checks run in float64; a wrong formula is off by far more, rounding by far less
WIDTH = 100  # of the console text


class Failed(Exception):
    """What was expected and what came instead."""


class Skipped(Exception):
    """Why a blank cannot be checked on this machine."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Failed(message)


def require_close(got: Tensor, want: Tensor | list | float, case: str, *, tolerance: float = TOLERANCE) -> None:
    """`got` has the shape and, within `tolerance`, the values of `want`."""
    want = torch.as_tensor(want, dtype=torch.float64)
    require(isinstance(got, Tensor), f"{case}: expected a tensor, got {type(got).__name__}")
    require(got.shape == want.shape, f"{case}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    error = (got.detach().double() - want).abs()
    require(bool((error <= tolerance).all()), f"{case}: expected {show(want)}, got {show(got)}")  # NaN fails too


def gradient(loss: Tensor, of: Tensor, case: str) -> Tensor:
    """d loss / d `of`; a loss that does not depend on it is a failure with a message, not an exception."""
    require(isinstance(loss, Tensor) and loss.dim() == 0, f"{case}: expected a scalar tensor")
    require(loss.requires_grad, f"{case}: the loss carries no gradient at all")
    (found,) = torch.autograd.grad(loss, of, allow_unused=True)
    require(found is not None, f"{case}: no gradient reaches the log-probs")
    return found


def show(values: Tensor) -> str:
    """Numbers short enough to compare by eye; six digits tell a wrong formula from a right one."""
    if values.dim() == 0:
        return f"{values.item():.6g}"
    return "[" + ", ".join(show(value) for value in values.detach()) + "]"


def run(title: str, answers: dict, checks: Sequence[Callable]) -> None:
    """Check the functions in `answers` (the globals() of exercise.py or solution.py) and report; exits."""
    torch.set_num_threads(1)  # tensors of a few numbers
    print(title)
    failures, skipped, open_names = 0, 0, set()
    for check in checks:
        names = list(inspect.signature(check).parameters)
        if len(names) > 1 and open_names.intersection(names):
            failures += 1
            print(f"  waits   {', '.join(names)}: together, once each passes alone")
            continue
        try:
            check(*(answers[name] for name in names))
        except Skipped as reason:
            skipped += 1
            print(f"  skipped {', '.join(names)}: {reason}")
            continue
        except NotImplementedError:
            outcome, why = "blank", ""
        except Failed as failure:
            outcome, why = "failed", str(failure)
        except Exception as error:  # the reader's code may raise anything
            outcome, why = "failed", f"it raised {type(error).__name__}: {error}{where(error, answers['__file__'])}"
        else:
            outcome, why = "passed", ""
        print(f"  {outcome:<8}{', '.join(names)}")
        if outcome != "passed":
            failures += 1
            open_names.update(names)
            for text in filter(None, [why, "hint: " + " ".join(inspect.getdoc(check).split())]):
                print(textwrap.fill(text, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10))
    print(f"{len(checks) - failures - skipped} of {len(checks)} passed" + f", {skipped} skipped" * bool(skipped))
    sys.exit(failures > 0)


def where(error: Exception, file: str) -> str:
    """The last line of the reader's own file on the way to the error."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == Path(file).name]
    return f" (line {own[-1].lineno} of {Path(file).name}: {own[-1].line})" if own else ""
