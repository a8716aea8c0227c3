"""docs/deviations.md: each default in which we differ from TRL or verl names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "deviations.md").read_text()
HEADER = ["default", "here", "TRL", "verl", "test"]


def rows() -> list[list[str]]:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")
    ]
    return [cells for cells in lines if cells != HEADER and set(cells[0]) != {"-"}]


def test_each_deviation_names_a_test_that_exists():
    written = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text() for path in TESTS.glob("test_*.py")), re.M))
    for cells in rows():
        assert len(cells) == len(HEADER), cells
        assert re.fullmatch(r"`(test_\w+)`", cells[-1]), f"{cells[0]}: name one test in the last column"
        assert cells[-1].strip("`") in written, f"{cells[0]}: there is no {cells[-1]}"


def test_the_page_has_the_deviations_that_change_a_number_most():
    text = " ".join(" ".join(cells[:2]) for cells in rows())
    for word in (
        "standard deviation",
        "added to it",
        "weight of a token's KL",
        "rows without",
        "averages over",
        "cap",
        "bound",
    ):
        assert word in text, word
    assert len(rows()) >= 20
