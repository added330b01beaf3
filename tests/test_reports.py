"""docs/reports_covered.md and the tests that it names belong together."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ID = re.compile(r"^(?:IMG|TOK|POS|LP|SPL|DIST|SYNC|CKPT|VID)-\d\d$")
IN_NAME = re.compile(r"(?:img|tok|pos|lp|spl|dist|sync|ckpt|vid)_\d\d(?=_|$)")


def rows() -> dict[str, list[str]]:
    """id -> cells of its row."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "reports_covered.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if ID.match(cells[0].strip()):
            assert cells[0] not in found, f"{cells[0]} has two rows"
            found[cells[0]] = cells
    return found


def names_of_tests() -> set[str]:
    """Names of all tests of the suite."""
    return {
        node.name
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_covered_row_names_a_test_that_exists_and_carries_its_id():
    tests = names_of_tests()
    for name, cells in rows().items():
        assert len(cells) == 4 and all(cells), cells
        test = cells[3].strip("`")
        assert test in tests, f"{name}: there is no {test}"
        assert name.lower().replace("-", "_") in IN_NAME.findall(test), f"{name}: {test} has another id"


def test_every_id_in_a_tests_name_has_its_row():
    named = {found.upper().replace("_", "-") for test in names_of_tests() for found in IN_NAME.findall(test)}
    assert named == set(rows()), named ^ set(rows())
