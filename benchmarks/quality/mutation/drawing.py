"""Mutants of Python sources: all that cosmic-ray's operators make, less those that are noise, and a sample of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

#: Of the replacements for one operator only these: another one (``+`` by ``**``) fails in every test that reaches it.
REPLACED = {
    "ReplaceBinaryOperator": (
        *("Add_Sub", "Sub_Add", "Mul_Div", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "FloorDiv_Add", "Mod_FloorDiv"),
        *("Mod_Add", "Pow_Mul", "BitAnd_BitOr", "BitOr_BitAnd", "BitXor_BitAnd", "LShift_RShift", "RShift_LShift"),
    ),
    "ReplaceComparisonOperator": (
        *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
        *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    ),
    "ReplaceUnaryOperator": ("Delete_Not", "Delete_USub", "Delete_Invert"),
}
OTHERS = (
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer", "RemoveDecorator"),
    "ZeroIterationForLoop",
)
#: These decorators change nothing at run time.
SILENT_DECORATORS = ("@final", "@override", "@overload", "@abstractmethod")
#: Calls and keyword arguments that hold the text of an error.
WRITERS = ("Refusal", "explain_problem")
TEXTS = ("expected", "got", "fix")


@final
class DropKeyword(Operator):
    """Removes a keyword argument of a call: an option that one part does not hand on to another."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        for argument in _keywords(node):
            yield argument.start_pos, argument.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        place = node.children.index(_keywords(node)[index])
        if node.type == "arglist":
            comma = place + 1 if place + 1 < len(node.children) else place - 1
            del node.children[min(place, comma) : max(place, comma) + 1]
        else:
            del node.children[place]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _keywords(node: Any) -> list[Any]:
    """The arguments ``name=value`` that lie directly in a call's list of arguments."""
    if node.type == "arglist":
        of_call = node.parent.type == "trailer"
    else:
        of_call = node.type == "trailer" and node.children[0].value == "("
    arguments = node.children if of_call else ()
    return [each for each in arguments if each.type == "argument" and each.children[1] == "="]


@final
@dataclass(frozen=True)
class Mutant:
    """One change of one source.

    Args:
        path: of the source, from the root of the checkout.
        lines: the first and the last line that change.
        operator: what cosmic-ray names the kind of change.
        occurrence: how many places of the source the operator passes before this one.
        change: the changed lines, before and after.
    """

    path: str
    lines: tuple[int, int]
    operator: str
    occurrence: int
    change: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.lines[0]} {self.operator}#{self.occurrence}"

    def apply(self, text: str) -> str:
        changed = mutate_code(text, operators()[self.operator], self.occurrence)
        if changed is None:
            raise ValueError(f"{self.name} is not in the source any more")
        return changed


def operators() -> dict[str, Operator]:
    names = [f"{kind}_{pair}" for kind, pairs in REPLACED.items() for pair in pairs]
    found = {name: get_operator(f"core/{name}")() for name in (*names, *OTHERS)}
    return {**found, "DropKeyword": DropKeyword()}


def is_noise(node: Any) -> bool:
    """Whether a change of this node cannot matter, or matters only for what is written out for people."""
    if node.type == "decorator":
        return node.get_code().strip().startswith(SILENT_DECORATORS)
    if node.type == "argument" and node.children[0].value in TEXTS:
        return True
    child, parent = node, node.parent
    if node.type == "operator" and parent.type in ("param", "parameters", "argument", "star_expr", "lambdef"):
        return True  # a star before arguments, which no number is multiplied with
    while parent is not None:
        if parent.type in ("raise_stmt", "fstring", "decorator", "import_from", "import_name"):
            return True
        if parent.type in ("param", "tfpdef") and child is getattr(parent, "annotation", None):
            return True
        if parent.type == "tfpdef" and child is parent.children[-1]:
            return True
        if parent.type == "annassign" and child is parent.children[1]:
            return True
        if parent.type == "funcdef" and (child is parent.annotation or parent.name.value == "__repr__"):
            return True
        if parent.type == "if_stmt" and "TYPE_CHECKING" in parent.children[1].get_code():
            return True
        if parent.type in ("power", "atom_expr") and parent.children[0].get_code().strip() in WRITERS:
            return True
        child, parent = parent, parent.parent
    return False


def mutants_of(root: Path, path: str) -> Iterator[Mutant]:
    """All mutants of one source."""
    text = (root / path).read_text(encoding="utf-8")
    nodes = list(ast_nodes(get_ast(text)))
    for name, operator in operators().items():
        positions = [(node, place) for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (node, (start, stop)) in enumerate(positions):
            if name == "DropKeyword":
                node = next(each for each in _keywords(node) if each.start_pos == start)
            if not is_noise(node):
                yield Mutant(path, (start[0], stop[0]), name, occurrence, "")


def describe(before: str, after: str) -> str:
    """The first changed lines of a text, before and after."""
    old, new = before.splitlines(), after.splitlines()
    first = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    last = next((n for n, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), 0)
    return (
        " ".join(line.strip() for line in old[first : max(first + 1, len(old) - last)])
        + " → "
        + (" ".join(line.strip() for line in new[first : max(first + 1, len(new) - last)]))
    )


def draw(root: Path, package: str, count: int, seed: int) -> list[Mutant]:
    """A sample of the mutants of a package (a folder of sources), the same for the same seed and sources."""
    paths = sorted(str(path.relative_to(root)) for path in (root / package).glob("*.py"))
    return draw_from(root, paths, count, f"{seed} {package}")


def draw_from(root: Path, paths: Sequence[str], count: int, key: str) -> list[Mutant]:
    """A sample of the mutants of some sources, the same for the same key and sources."""
    found = [mutant for path in paths for mutant in mutants_of(root, path)]
    drawn = []
    for mutant in random.Random(key).sample(found, min(count, len(found))):
        text = (root / mutant.path).read_text(encoding="utf-8")
        change = describe(text, mutant.apply(text))
        drawn.append(Mutant(mutant.path, mutant.lines, mutant.operator, mutant.occurrence, change))
    return drawn
