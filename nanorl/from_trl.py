"""A GRPOConfig of TRL's as options of train_grpo.py: what has a counterpart, and why the rest has none.

Names and defaults are those of TRL 1.16. What defines the algorithm is always translated, at TRL's default where the
file does not say otherwise; the rest (learning rate, lengths, folders) only where the file gives it.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanorl.errors import RunError
from nanorl.trl_fields import CHOICES, COUNTS, DEFAULTS, NUMBERS, REASONS, RENAMED, SIZES, SWITCHES


def read(path: Path) -> dict[str, Any]:
    """Fields of a GRPOConfig in a file: JSON, Python that calls GRPOConfig(...), keywords, or lines key=value.

    Nothing in the file is run. A field that TRL 1.16 does not know is an error that names the nearest ones.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        pairs = json.loads(text, object_pairs_hook=list) if text.lstrip().startswith("{") else keywords(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise RunError(f"{path} is neither JSON nor keywords of GRPOConfig: {error}") from None
    given = {}
    for name, value in pairs:
        if name in given:
            raise RunError(f"{path} gives {name} twice")
        if name not in DEFAULTS and name not in REASONS:
            near = difflib.get_close_matches(name, [*DEFAULTS, *REASONS], 3, 0.5)
            mend = f"did you mean {' or '.join(near)}?" if near else "look it up in TRL's documentation"
            raise RunError(f"{path}: GRPOConfig of TRL 1.16 has no {name}: {mend}")
        given[name] = value
    return given


def keywords(text: str) -> list[tuple[str, Any]]:
    """Python's text -> (name, value) pairs: of the call of GRPOConfig in it, else of all of it as keywords or lines."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        tree = ast.parse(f"GRPOConfig({text}\n)")  # keywords on several lines
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) == "GRPOConfig"]
    if len(calls) > 1:
        raise ValueError(f"GRPOConfig is called {len(calls)} times: leave one of them")
    if calls:
        if calls[0].args or any(keyword.arg is None for keyword in calls[0].keywords):
            raise ValueError("give every field of GRPOConfig by its name")
        return [(keyword.arg, literal(keyword.arg, keyword.value)) for keyword in calls[0].keywords]
    pairs = []
    for line in tree.body:
        if not (isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name)):
            raise ValueError(f"line {line.lineno} is not key=value")
        value = line.value
        if isinstance(value, ast.Tuple) and len(value.elts) == 1:  # a comma at the end of the line
            value = value.elts[0]
        pairs.append((line.targets[0].id, literal(line.targets[0].id, value)))
    return pairs


def literal(name: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):  # a word without quotes
        return {"true": True, "false": False, "null": None, "none": None}.get(node.id.lower(), node.id)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # of the second kind: a list as the key of a dict
        raise ValueError(f"{name} must be a plain value, not {ast.unparse(node)}") from None


@dataclass
class Translation:
    """`flags` of train_grpo.py, what to know about them, and the fields `without` counterpart with the reason."""

    flags: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        flags = {"algo": "CHOOSE"} | self.flags  # where no algorithm fits, train_grpo.py lists those there are
        words = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
        parts = [shlex.join(["python", "train_grpo.py", *words])]
        if self.remarks:
            parts.append("\n  ".join(["To know:", *self.remarks]))
        if self.without:
            parts.append("\n  ".join(["Without counterpart:", *(f"{a}: {b}" for a, b in self.without.items())]))
        return "\n\n".join(parts)


def translate(given: dict[str, Any]) -> Translation:
    """Fields of a GRPOConfig -> options of train_grpo.py. A value of the wrong kind is an error, a RunError."""
    fields = checked(DEFAULTS | {name: value for name, value in given.items() if name in DEFAULTS})
    result = Translation(without={name: REASONS[name] for name in given if name in REASONS})
    algorithm(fields, result)
    if fields["mask_truncated_completions"]:
        result.flags["extras"] = "overlong_filtering"
        if result.flags.get("algo") in ("grpo", "dr_grpo", "gspo"):
            result.remarks.append(
                "TRL divides by the number of all responses, masked ones too; here those are in no mean"
            )
    clipping(fields, given, result)
    penalty(fields, given, result)
    batches(fields, given, result)
    importance(fields, given, result)
    for name, option in RENAMED.items():
        if fields[name] is not None and name in given:
            result.flags[option] = fields[name]
    for name in ("save_steps", "eval_steps"):
        if name in given and isinstance(fields[name], float):
            del result.flags[RENAMED[name]]
            result.without[name] = "a share of the run's steps: give a number of steps"
    if fields["max_completion_length"] is None:
        result.without["max_completion_length"] = "a response needs a limit: left to the task"
    if "learning_rate" in given:
        result.remarks.append(
            "--learning-rate is Muon's here, whose steps differ in size from AdamW's: 1e-3 by default"
        )
    if fields["bf16"] is not None:
        result.flags["dtype"] = "bfloat16" if fields["bf16"] else "float32"
    if fields["use_cpu"]:
        result.flags["device"] = "cpu"
    return result


def checked(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, each of the kind TRL takes."""
    if isinstance(fields["scale_rewards"], bool):
        fields["scale_rewards"] = "group" if fields["scale_rewards"] else "none"

    def refuse(name: str, expected: str):
        raise RunError(f"{name} must be {expected}, not {fields[name]!r}")

    for name, choices in CHOICES.items():
        if fields[name] not in choices:
            refuse(name, f"one of {', '.join(choices)}")
    for kind, expected, allowed in (
        (SWITCHES, "True or False", lambda value: isinstance(value, bool)),
        (COUNTS, "a whole number of at least 1", lambda value: type(value) is int and value >= 1),
        (NUMBERS, "a number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max),
    ):
        for name, default in kind.items():
            optional = default is None or name in ("max_completion_length", "vllm_importance_sampling_clip_max")
            if not (allowed(fields[name]) or (optional and fields[name] is None)):
                refuse(name, expected)
    return fields


def algorithm(fields: dict[str, Any], result: Translation) -> None:
    """--algo, and what of the algorithm its row decides."""
    loss, level = fields["loss_type"], fields["importance_sampling_level"]
    if loss in ("sapo", "luspo", "vespo"):
        result.without["loss_type"] = f"there is no {loss} here: write it as a loss of your own"
        return
    if loss == "bnpo":
        result.without["loss_type"] = (
            "bnpo's mean is over the tokens of a micro-batch and changes with its size; --algo dapo has the mean over "
            "those of the whole batch"
        )
        return
    if level == "sequence" and loss != "grpo":
        result.without["importance_sampling_level"] = (
            f"the ratio of a sequence under loss_type={loss!r} weighs long responses more, which is not GSPO: "
            "that is loss_type='grpo', here --algo gspo"
        )
        return
    algo = result.flags["algo"] = "gspo" if level == "sequence" else loss
    scale = "none" if algo == "dr_grpo" else "group"
    if fields["scale_rewards"] != scale:
        result.without["scale_rewards"] = (
            f"--algo {algo} has scale {scale!r} (its row in nanorl/algorithms.py), not {fields['scale_rewards']!r}"
        )
    if algo == "dapo":  # TRL's is the loss alone
        result.flags["extras"] = "none"


def clipping(fields: dict[str, Any], given: dict[str, Any], result: Translation) -> None:
    """--clip-low and --clip-high. TRL takes epsilon for both sides where epsilon_high is not given."""
    algo, low = result.flags.get("algo"), fields["epsilon"]
    high = low if fields["epsilon_high"] is None else fields["epsilon_high"]
    if algo is None:
        reason = "its meaning is the algorithm's, which is yours to choose"
        result.without |= {name: reason for name in ("epsilon", "epsilon_high") if name in given}
    elif algo == "cispo":
        if "epsilon" in given and fields["epsilon_high"] is not None:
            result.without["epsilon"] = "without effect under cispo, whose weight has no lower bound"
        if high < 1:
            name = "epsilon" if fields["epsilon_high"] is None else "epsilon_high"
            result.without[name] = (
                f"TRL's cispo caps every weight at {high:g}, below the 1 of an unchanged policy; here the cap is "
                "1 + --clip-high, ScaleRL's is epsilon_high=5.0"
            )
        else:
            result.flags["clip_high"] = round(high - 1, 12)
            result.remarks.append("cispo: TRL's epsilon_high is the cap itself, here the cap is 1 + --clip-high")
    else:
        result.flags |= {"clip_low": min(low, 1), "clip_high": high}  # no ratio is below 0
        if algo == "gspo" and low >= 0.01:
            result.remarks.append("gspo: the paper clips at 3e-4 and 4e-4; 0.2 hardly ever clips a sequence's ratio")
    if fields["delta"] is not None:
        result.without["delta"] = (
            "no option; if it is above 1 + epsilon_high, `dual_clip` of the losses bounds the same"
        )


def penalty(fields: dict[str, Any], given: dict[str, Any], result: Translation) -> None:
    """--beta: the KL term is k3, never multiplied by the ratio."""
    result.flags["beta"] = fields["beta"]
    name = "use_bias_correction_kl"
    if fields["beta"] and fields[name]:
        result.without[name] = (
            "on in TRL unless set to False: multiplies the KL term by the ratio, which is not done here"
        )
    elif name in given:
        result.remarks.append(
            f"{name} = {fields[name]}: " + ("as here" if fields["beta"] else "without effect, beta is 0")
        )


def batches(fields: dict[str, Any], given: dict[str, Any], result: Translation) -> None:
    """--group-size, --prompts, --updates-per-rollout, --epochs, --steps, for one process."""
    rows, accumulated = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
    per_rollout, size = fields["steps_per_generation"], fields["generation_batch_size"]  # micro-batches, rows
    group, epochs = fields["num_generations"], fields["num_iterations"]
    if per_rollout is not None and size is not None:
        raise RunError("steps_per_generation and generation_batch_size exclude each other: give one of them")
    if size is not None and size % rows:
        raise RunError(f"generation_batch_size {size} is no multiple of per_device_train_batch_size {rows}")
    if per_rollout is None:
        per_rollout = accumulated if size is None else size // rows
    result.flags |= {"group_size": group, "epochs": epochs}
    updates = 1
    if per_rollout % accumulated == 0:
        updates = result.flags["updates_per_rollout"] = per_rollout // accumulated
    elif accumulated % per_rollout == 0 and epochs == 1:  # several rollouts of one policy make an update
        result.flags["updates_per_rollout"] = 1
        per_rollout = accumulated
    else:
        result.without["steps_per_generation"] = (
            f"an update takes {accumulated} micro-batches and a rollout has {per_rollout}: updates straddle rollouts"
        )
    if SIZES & given.keys():
        if rows * per_rollout % group:
            result.remarks.append(
                f"{rows * per_rollout} responses a rollout are no whole groups of {group}: set --prompts"
            )
        else:
            result.flags["prompts"] = rows * per_rollout // group
            result.remarks.append("--prompts is for one process: multiply by the number of yours")
            if updates > result.flags["prompts"]:
                del result.flags["updates_per_rollout"]
                result.without["steps_per_generation"] = (
                    f"{updates} updates on {result.flags['prompts']} groups take groups apart; here they stay whole"
                )
    if "per_device_train_batch_size" in given:
        result.flags["micro_batch"] = rows
    if fields["max_steps"] > 0:
        result.flags["steps"] = math.ceil(fields["max_steps"] / (updates * epochs))
        if updates * epochs > 1:
            result.remarks.append(f"a step here is a rollout with its {updates * epochs} updates, in TRL one update")


def importance(fields: dict[str, Any], given: dict[str, Any], result: Translation) -> None:
    """--importance-cap: truncated weights of tokens, for a sampler that differs from the scorer."""
    prefix = "vllm_importance_sampling_"
    if "use_vllm" in given:
        result.without["use_vllm"] = "sampling has one path, in this process"
    names = [name for name in given if name.startswith(prefix)]
    if not (fields["use_vllm"] and fields[prefix + "correction"]):
        result.without |= dict.fromkeys(names, "without effect: use_vllm or the correction is off")
        return
    cap = fields[prefix + "clip_max"] if fields[prefix + "cap"] is None else fields[prefix + "cap"]
    truncated = fields[prefix + "mode"] == "token_truncate" and fields[prefix + "clip_min"] is None and cap is not None
    if truncated and result.flags.get("algo") != "gspo":
        result.flags["importance_cap"] = cap
    else:
        result.without[prefix + "correction"] = (
            "on in TRL with use_vllm; of its modes only token_truncate with clip_max alone is here: --importance-cap "
            "(with gspo it is one weight a sequence)"
        )
