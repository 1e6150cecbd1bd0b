"""No collective stands under a condition that may differ between ranks: each such call is listed with its reason."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import fourfold

PACKAGE = Path(fourfold.__file__).parent
TABLE = Path(__file__).with_name("collective_conditions.toml")

COLLECTIVES = {
    # comm and wire
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_gather_together", "reduce_scatter_together"),
    *("all_reduce_together", "equal_along", "from_first", "from_pipe"),
    # through the job's store, where ranks wait for each other
    *("agree", "agree_in_time", "agree_on_change", "run_together", "run_on_rank0", "broadcast_text", "texts_by_pipe"),
    *("decide", "agree_on_facts", "first_fault"),
    # what is made of them
    *("sum_over_batch", "sum_of_places", "count_held", "count_targets", "global_mean", "gather_rows", "whole_batch"),
    *(
        "global_loss",
        "loss_of_group",
        "check_rows",
        "_check_rows",
        "_require_same_buffers",
        "read_whole",
        "whole_tensor",
    ),
    *("BucketSum", "deposit_whole", "_meet", "_agree_on", "_ask", "_take_part", "hand_in_nothing"),
}
"""The functions that all ranks along some axes must call together."""
OWNERS = ("comm.py", "wire.py", "job.py")
"""Files that make these functions of each other; their conditions are sizes of axes and shapes of messages."""


class ConditionalCalls(ast.NodeVisitor):
    """Finds the collectives of a file that stand under conditions: (function, call, conditions)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, str]] = []
        self._function, self._conditions = "", []

    def _under(self, condition: str, *nodes: ast.AST) -> None:
        self._conditions.append(condition)
        for node in nodes:
            self.visit(node)
        self._conditions.pop()

    def _body(self, statements: list[ast.stmt]) -> None:
        """Visit statements; what follows `if test: return` stands under that condition too."""
        before = list(self._conditions)
        for statement in statements:
            self.visit(statement)
            leaves = (ast.Return, ast.Continue, ast.Break)  # whoever raises ends the job
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], leaves):
                self._conditions.append(f"not ({ast.unparse(statement.test)})")
        self._conditions = before

    def generic_visit(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._body(value)
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self._function, self._conditions = (self._function, self._conditions), node.name, []
        self.generic_visit(node)
        self._function, self._conditions = before

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in COLLECTIVES and self._conditions:
            self.found.append((self._function, called, "; ".join(self._conditions)))
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While) -> None:
        self.visit(node.test)
        test = ast.unparse(node.test)
        for sign, body in ((test, node.body), (f"not ({test})", node.orelse)):
            self._conditions.append(sign)
            self._body(body)
            self._conditions.pop()

    visit_While = visit_If  # noqa: N815

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._under(ast.unparse(node.test), node.body)
        self._under(f"not ({ast.unparse(node.test)})", node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        for earlier, later in pairwise(node.values):
            self._under(ast.unparse(earlier), later)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._conditions.append("an exception")
        self._body(node.body)
        self._conditions.pop()

    def visit_match_case(self, node: ast.match_case) -> None:
        self._conditions.append(f"case {ast.unparse(node.pattern)}")
        self._body(node.body)
        self._conditions.pop()

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        tests = [ast.unparse(test) for each in node.generators for test in each.ifs]
        self._conditions += tests
        self.generic_visit(node)
        del self._conditions[len(self._conditions) - len(tests) :]

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp  # noqa: N815


def conditional_calls(path: Path) -> list[tuple[str, str, str]]:
    finder = ConditionalCalls()
    finder.visit(ast.parse(path.read_text()))
    return finder.found


def test_every_collective_under_a_condition_has_its_reason() -> None:
    table = tomllib.loads(TABLE.read_text())
    reasons = table.pop("reasons")
    calls: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for function, called, conditions in conditional_calls(path) if name not in OWNERS else ():
            calls[f"{name} {function}"].add(f"{called} if {conditions}")
    new = [f"{name}: {call}" for name in calls for call in sorted(calls[name] - table.get(name, {}).keys())]
    gone = [f"{name}: {call}" for name in table for call in sorted(table[name].keys() - calls.get(name, set()))]
    assert not new, f"say in {TABLE.name} why all ranks find the same here, or move the call:\n" + "\n".join(new)
    assert not gone, f"no longer there, take it out of {TABLE.name}:\n" + "\n".join(gone)
    assert {reason for listed in table.values() for reason in listed.values()} == reasons.keys()


CALLS = """
def plain(grid):
    equal_along(1, grid)

def hidden(grid, seen):
    if seen:
        return
    for each in seen:
        x = seen and equal_along(1, grid)
    y = [comm.all_reduce(t) for t in seen if t.any()]
    z = agree(1) if seen else 0
    try:
        pass
    except ValueError:
        while seen:
            sum_over_batch(1)
"""


def test_conditions_of_all_forms_are_found(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    assert conditional_calls(tmp_path / "calls.py") == [
        ("hidden", "equal_along", "not (seen); seen"),
        ("hidden", "all_reduce", "not (seen); t.any()"),
        ("hidden", "agree", "not (seen); seen"),
        ("hidden", "sum_over_batch", "not (seen); an exception; seen"),
    ]
