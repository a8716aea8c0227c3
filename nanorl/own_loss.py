"""A loss of your own, in a file of your own, with everything else unchanged:

    python train_grpo.py --loss my_loss.py:my_loss --loss-args sharpness=2

The file holds a function of the loss contract,

    def my_loss(logprobs, old_logprobs, advantages, mask, *, sharpness=1.0, denominator=None):
        ...
        return loss, metrics

logprobs, old_logprobs, mask are (B, T), advantages (B,), or (B, T) with importance weights. `denominator` is what the
mean over the whole batch divides by (nanorl/losses/aggregate.py), so that micro-batches change nothing. `loss` is a
scalar with a gradient to `logprobs`; `metrics` is a dict of detached scalars, means over tokens, which are logged.
The loop also hands over ref_logprobs, beta, clip_low, clip_high and max_length, if the signature names them; the
function's other keywords are set with --loss-args.

Advantages and denominator are those of the row that --algo names (nanorl/algorithms.py), unless the file says otherwise
with lines of its own: `advantage_scale = "none"`, `mean_over = "tokens"`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from nanorl.algorithms import Algorithm
from nanorl.errors import RunError

POSITIONAL = ["logprobs", "old_logprobs", "advantages", "mask"]
ALWAYS = ["denominator", "max_length"]  # handed over in every step
SOMETIMES = ["ref_logprobs", "beta", "clip_low", "clip_high"]  # with the options that ask for them
CONTRACT = (
    f"the contract is loss, metrics = f({', '.join(POSITIONAL)}, *, denominator=None, ...), see nanorl/own_loss.py"
)


def with_own_loss(
    row: Algorithm, spec: str | None, arguments: Sequence[str] = (), *, weighted: bool = False
) -> Algorithm:
    """`row` with the loss FILE.py:FUNCTION (None: its own) and with the keywords k=v bound to it.
    `weighted`: importance weights will make advantages (B, T) of (B,), where the ratio is a token's.

    Raises RunError for whatever is wrong with them. The loss has then been tried on a small batch.
    """
    if spec is None and not arguments:
        return row
    said: dict[str, Any] = {}
    function = row.loss
    if spec is not None:
        module, name = load(spec)
        function = getattr(module, name)
        said = rest_of_the_row(module)
    check_signature(function)
    options = parse_arguments(function, arguments)
    loss = functools.update_wrapper(functools.partial(function, **options), function)
    algorithm = dataclasses.replace(row, loss=loss, **said)
    try_out(algorithm, weighted and algorithm.level == "token")
    return algorithm


def load(spec: str) -> tuple[ModuleType, str]:
    """The module and the function's name of FILE.py:FUNCTION."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise RunError(f"--loss {spec}: expected FILE.py:FUNCTION, my_loss.py:my_loss say")
    path = Path(file)
    if not path.is_file():
        raise RunError(f"--loss {spec}: there is no file {path} (looked in {path.resolve().parent})")
    made = importlib.util.spec_from_file_location(f"own_loss_{path.stem}", path)
    module = importlib.util.module_from_spec(made)
    try:
        made.loader.exec_module(module)
    except Exception as error:  # the file may do anything
        raise RunError(f"--loss {spec}: {path} cannot be loaded: {describe(error, path)}") from error
    if not inspect.isroutine(getattr(module, name, None)):
        found = [n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == made.name]
        raise RunError(f"--loss {spec}: {path} has no function {name}; it has {', '.join(found) or 'none'}")
    return module, name


def rest_of_the_row(module: ModuleType) -> dict[str, Any]:
    """What the file says about the algorithm around its loss: those fields of a row that are a choice of a few."""
    said = {}
    for name, annotation in get_type_hints(Algorithm).items():
        choices = get_args(annotation)
        if get_origin(annotation) is Literal and hasattr(module, name):
            said[name] = getattr(module, name)
            if said[name] not in choices:
                raise RunError(f"{module.__file__}: {name} = {said[name]!r} is unknown: choose one of {choices}")
    return said


def check_signature(function: Callable) -> None:
    names = inspect.signature(function).parameters
    parameters = list(names.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wrong = None
    if positional[:4] != POSITIONAL:
        wrong = f"its first four parameters are ({', '.join(positional[:4])})"
    elif any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        wrong = "it takes *args or **kwargs, which would hide a misspelt keyword"
    elif "denominator" not in names:
        wrong = "it has no keyword `denominator`"
    elif "beta" in names and "ref_logprobs" not in names:
        wrong = "it has the keyword `beta` without `ref_logprobs`"
    if wrong:
        raise RunError(f"{function.__name__} is no loss: {wrong}; {CONTRACT}")


def parse_arguments(function: Callable, arguments: Sequence[str]) -> dict[str, Any]:
    """k=v of --loss-args by name; a value that is no Python literal is a text."""
    keywords = dict(list(inspect.signature(function).parameters.items())[4:])
    own = [name for name in keywords if name not in ALWAYS + SOMETIMES]
    options: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise RunError(f"--loss-args {argument}: expected KEYWORD=VALUE")
        if name not in own:
            why = "is handed over by the training loop" if name in keywords else "is not in its signature"
            raise RunError(
                f"--loss-args {argument}: {name} {why}; {function.__name__} has {', '.join(own) or 'no keyword'} to set"
            )
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    for name, parameter in keywords.items():
        if parameter.default is parameter.empty and name not in [*options, *ALWAYS]:
            mend = f"set it with --loss-args {name}=..., or give it one" if name in own else "give it one"
            raise RunError(f"the keyword {name} of {function.__name__} has no default: {mend}; {CONTRACT}")
    return options


def try_out(algorithm: Algorithm, weighted: bool) -> None:
    """One call on two responses of 3 and 2 tokens: what is wrong shows now, not after the warm start."""
    loss_function, name = algorithm.loss, algorithm.loss.__name__
    logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.5, 0.0]], requires_grad=True)
    old_logprobs = torch.tensor([[-1.1, -0.5, -1.9], [-0.6, -1.7, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    handed = {"denominator": algorithm.denominator(mask), "max_length": 3, "ref_logprobs": old_logprobs}
    advantages = torch.tensor([1.0, -1.0])
    handed = {key: value for key, value in handed.items() if key in inspect.signature(loss_function).parameters}
    try:
        result = loss_function(logprobs, old_logprobs, advantages, mask, **handed)
    except Exception as error:  # the function may do anything
        raise RunError(
            f"{name} failed on a small batch: {describe(error, where(loss_function))}; {CONTRACT}"
        ) from error

    def require(holds: bool, found: str) -> None:
        if not holds:
            raise RunError(f"{name} returned {found}; {CONTRACT}")

    require(isinstance(result, tuple) and len(result) == 2, f"{kind(result)} instead of the pair (loss, metrics)")
    loss, metrics = result
    require(isinstance(loss, Tensor), f"{kind(loss)} as the loss, instead of a scalar tensor")
    require(loss.dim() == 0, f"a loss of shape {tuple(loss.shape)} instead of a scalar: take a mean over the mask")
    require(loss.requires_grad, "a loss without a gradient: something is detached, or made from numbers")
    require(bool(loss.isfinite()), f"a loss of {loss.item()} on a small batch of ordinary values")
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    require(gradient is not None, "a loss that does not depend on logprobs")
    require(isinstance(metrics, dict), f"{kind(metrics)} as metrics, instead of a dict from names to scalars")
    for key, value in metrics.items():
        scalar = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)
        require(scalar, f"a metric {key!r} that is {kind(value)} instead of a scalar")
        require(not getattr(value, "requires_grad", False), f"a metric {key!r} that carries a gradient: detach it")
    if weighted:  # (B, 1, T) * (B, T) would be another loss, or an error after the warm start
        what = "with --importance-cap advantages are (B, T): take advantages[:, None] only where they are (B,)"
        try:
            again, _ = loss_function(logprobs, old_logprobs, advantages[:, None].expand(mask.shape), mask, **handed)
        except Exception as error:  # as above
            raise RunError(
                f"{name} failed on a small batch: {describe(error, where(loss_function))}; {what}"
            ) from error
        require(torch.allclose(again, loss), f"another loss for the same advantages as (B, T); {what}")
    if gradient[~mask].any():
        text = f"{name} has a gradient outside the mask, so padding changes it: see nanorl/losses/aggregate.py"
        warnings.warn(text, stacklevel=2)


def where(function: Callable) -> Path:
    """The file that holds it."""
    return Path(inspect.unwrap(function).__code__.co_filename)


def kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def describe(error: Exception, path: Path) -> str:
    """What was raised, and at which line of the file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    where = f" (line {lines[-1]} of {path.name})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
