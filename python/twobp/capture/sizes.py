"""SIZES of a bundle: the numbers that programs for many shapes of a micro-batch compute from the sizes of its fields.
They are computed once for each new shape, not once for each operator (docs/bundle.md)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .errors import CaptureError
from .symbols import expr_of, is_size, plain

MOST_POWER = 64


def power(a, b):
    if isinstance(a, int) and not 0 <= b <= MOST_POWER:
        raise OverflowError
    return a**b


DO: dict[str, Callable] = {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
    "pow": power,
    "truediv": operator.truediv,
    "float": float,
    "sqrt": math.sqrt,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": lambda a, b: bool(a and b),
    "or": lambda a, b: bool(a or b),
    "not": operator.not_,
}
OF_SYMPY = {
    "Add": "add",
    "Mul": "mul",
    "Pow": "pow",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Max": "max",
    "Min": "min",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "ToFloat": "float",
    "OpaqueUnaryFn_sqrt": "sqrt",
    "FloatPow": "pow",
    "PowByNatural": "pow",
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
    "And": "and",
    "Or": "or",
    "Not": "not",
}


class Sizes:
    """Entries {"field": name, "dim": d}, {"number": n} or {"do": "mul", "of": [i, j]}, where i and j are earlier
    entries. `fields` are those with symbolic sizes, of the environment `env`."""

    def __init__(self, fields: Mapping[str, torch.Tensor], env: ShapeEnv):
        self._env = env
        self.entries: list[dict] = []
        self._number: dict[sympy.Basic, int] = {}
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}  # how texts call a symbol
        self.symbols: dict[sympy.Symbol, tuple[str, int]] = {}
        for name, field in fields.items():
            for dim, size in enumerate(field.shape):
                if isinstance(size, torch.SymInt) and (expr := expr_of(size)).is_Symbol and expr not in self._number:
                    self._add(expr, {"field": name, "dim": dim})
                    self._names[expr] = sympy.Symbol(f"{name}.size({dim})")
                    self.symbols[expr] = name, dim

    def _add(self, expr: sympy.Basic, entry: dict) -> int:
        self._number[expr] = len(self.entries)
        self.entries.append(entry)
        return self._number[expr]

    def number(self, expr: sympy.Basic) -> int:
        """Returns the entry of an expression. Raises CaptureError."""
        if expr in self._number:
            return self._number[expr]
        if expr in (sympy.true, sympy.false):
            return self._add(expr, {"number": bool(expr)})
        if expr.is_number and not expr.args:
            return self._add(expr, {"number": int(expr) if expr.is_Integer else float(expr)})
        if expr.is_Symbol and expr in self._env.backed_var_to_val:  # a size of a field that turned out to be fixed
            return self._add(expr, {"number": int(self._env.backed_var_to_val[expr])})
        do = OF_SYMPY.get(type(expr).__name__)
        if do is None:
            raise CaptureError(f"a size is computed by {type(expr).__name__}, which programs do not have")
        if do == "pow" and expr.args[1].is_Integer and expr.args[1] < 0:
            of = [self.number(sympy.Integer(1)), self.number(expr.args[0] ** -expr.args[1])]
            return self._add(expr, {"do": "truediv", "of": of})
        of = [self.number(one) for one in expr.args]
        while len(of) > 2:  # these take any number of arguments
            self.entries.append({"do": do, "of": of[:2]})
            of = [len(self.entries) - 1, *of[2:]]
        return self._add(expr, {"do": do, "of": of})

    def place(self, code: Any) -> Any:
        """Returns programs with the entries of their sizes, in place of the sizes themselves."""
        if isinstance(code, dict):
            for key, value in code.items():
                code[key] = self.number(expr_of(value)) if key == "size" and is_size(value) else self.place(value)
            return code
        return [self.place(one) for one in code] if isinstance(code, list) else code

    def of_fields(self, fields: Mapping[str, torch.Tensor]) -> dict[str, list]:
        """Returns, for each dimension of the fields, its entry or its number."""
        return {
            name: [{"size": self.number(expr_of(s))} if is_size(plain(s)) else int(plain(s)) for s in field.shape]
            for name, field in fields.items()
        }

    def text(self, expr: sympy.Basic) -> str:
        return str(expr.xreplace(self._names))

    def guards(self) -> list[dict]:
        """Returns what must hold of a batch, as entries that must be true, with their texts."""
        guards: dict[int, dict] = {}
        for guard in self._env.guards:
            expr = self._env.simplify(guard.expr)
            if expr != sympy.true:
                entry = self.number(expr)
                guards.setdefault(entry, {"size": entry, "says": self.text(expr)})
        return list(guards.values())

    def at_least(self, symbol: sympy.Symbol, least: int) -> dict:
        """Returns a guard that is only an assumption of torch."""
        entry = self.number(sympy.Ge(symbol, least, evaluate=False))
        return {"size": entry, "says": f"{self._names[symbol]} >= {least}", "assumed": True}

    def at_most(self, symbol: sympy.Symbol, most: int) -> dict:
        """Returns a guard."""
        entry = self.number(sympy.Le(symbol, most, evaluate=False))
        return {"size": entry, "says": f"{self._names[symbol]} <= {most}"}


def numbers_of(entries: list[dict], fields: Mapping[str, torch.Tensor]) -> list | None:
    """Returns the numbers for a micro-batch, or None if one cannot be computed."""
    numbers: list = []
    try:
        for one in entries:
            if "do" in one:
                numbers.append(DO[one["do"]](*(numbers[i] for i in one["of"])))
            else:
                numbers.append(fields[one["field"]].shape[one["dim"]] if "field" in one else one["number"])
    except (ArithmeticError, ValueError):
        return None
    return numbers


def numbers_if_served(shape: dict, fields: Mapping[str, torch.Tensor]) -> tuple[list | None, str]:
    """Returns the numbers for a micro-batch that the shape of a bundle serves. For others, returns None and the
    reason."""
    for name, described in shape["fields"].items():
        if name not in fields or fields[name].dim() != len(described["shape"]):
            return None, f"'{name}' has other dimensions"
        if str(fields[name].dtype).removeprefix("torch.") != described["dtype"]:
            return None, f"'{name}' has another dtype"
    numbers = numbers_of(shape.get("sizes", []), fields)
    if numbers is None:
        return None, "its sizes cannot be computed"
    for name, described in shape["fields"].items():
        for dim, (size, own) in enumerate(zip(fields[name].shape, described["shape"])):
            wanted = numbers[own["size"]] if isinstance(own, dict) else own
            if size != wanted:
                return None, f"{name}.size({dim}) == {wanted}"
    for guard in shape.get("guards", []):
        if not numbers[guard["size"]]:
            return None, guard["says"]
    return numbers, ""
