"""Parameters of routed experts and of their routers that LoRA adapts as PEFT's `target_parameters`.

transformers stacks the experts of a layer, `[experts, out, in]`, and files may hold them one by
one. The factors of all experts of a parameter lie in one A `[r * experts, in]`, expert by expert,
and one B `[out, r * experts]`, rank by rank. Several adapted parameters of a module are nested: the
tensors of all but the last lie in a `base_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from trainer.config.lora import LoraSettings
from trainer.model.family import Family

ROUTED = frozenset(("experts", "gate", "router"))
"""Parts of a mixture of experts that are no linears, by the last parts of their names."""
FUSED = "gate_up_proj"
"""The parameter of gates and ups."""
_DOWN, _ROUTER = "down_proj", "gate.weight"
_ORDER = (FUSED, _DOWN)
"""Order of a module's parameters, as transformers defines them."""


class ExpertSlice(NamedTuple):
    """Where a tensor that is stored for one expert lies in the stacked parameter."""

    parameter: str
    expert: int
    part: int
    """Rows of gate (0) or up (1) in `gate_up_proj`."""


class AdaptedParameter(NamedTuple):
    """A parameter that gets an adapter."""

    parameter: str
    """Its full name in the model."""
    module: str
    """The module that holds the adapter's tensors in PEFT's files."""
    experts: int
    rows: int
    columns: int
    fused: bool
    """It holds two linears of each expert."""
    transposed: bool = False
    """The parameter is `[experts, in, out]`."""

    def factor_shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B for a rank of the parameter's own."""
        both = rank * self.experts
        return (both, self.columns), (self.rows, both)


def find_expert_slice(family: Family, name: str) -> ExpertSlice | None:
    """Return the place of a stored tensor; None if it is not one expert's."""
    moved = family.parameter_name(name)
    found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", moved)
    if not (family.experts and found) or found[3] not in family.experts:
        return None
    part = family.experts.index(found[3])
    stacked = _DOWN if part == 2 else FUSED
    return ExpertSlice(f"{found[1]}.{stacked}", int(found[2]), part % 2)


def stacked_parameters(
    family: Family, layer: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the stacked parameters of a layer's experts and its router, with their shapes.

    Args:
        layer: shapes of its stored tensors, by their names below the layer.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in layer.items():
        if (place := find_expert_slice(family, name)) is not None:
            rows = shape[0] * (2 if place.parameter.endswith(FUSED) else 1)
            count = max(place.expert + 1, found.get(place.parameter, (0,))[0])
            found[place.parameter] = (count, rows, shape[1])
            continue
        moved = family.parameter_name(name)
        *owner, last = moved.split(".")
        is_router = last == "weight" and bool(owner) and owner[-1] in ROUTED and len(shape) == 2
        if is_router or ("experts" in owner and len(shape) == 3):
            found[moved] = shape
    return found


def converted_targets(family: Family) -> dict[str, str]:
    """Return what PEFT makes of names of linears that transformers 5 stacks: parameters.

    Empty for families whose files hold stacked experts: PEFT adapts these by their parameters'
    names alone.
    """
    if family.experts is None or not family.converts_experts:
        return {}
    gate, up, down = family.experts
    return {"gate": _ROUTER, gate: FUSED, up: FUSED, down: _DOWN}


def targeted_parameters(family: Family, lora: LoraSettings) -> tuple[str, ...]:
    """Return the ends of the names of the parameters that a config adapts."""
    converted = converted_targets(family)
    if lora.target_modules is None and lora.target_parameters is None:
        return tuple(dict.fromkeys(converted.values()))
    named = (converted[name] for name in lora.target_modules or () if name in converted)
    return tuple(dict.fromkeys((*(lora.target_parameters or ()), *named)))


def has_fused_rank(family: Family, lora: LoraSettings) -> bool:
    """Return whether `gate_up_proj` has the rank of both of its linears: their names are given."""
    if not (converted := converted_targets(family)):
        return False
    if lora.target_modules is None:
        return lora.target_parameters is None
    return any(converted.get(name) == FUSED for name in lora.target_modules)


def adapted_parameters(
    stem: str, shapes: Mapping[str, tuple[int, ...]], family: Family, names: Collection[str]
) -> list[AdaptedParameter]:
    """Return the parameters of a layer that get an adapter, the innermost of a module first.

    Args:
        stem: the layer's module.
        shapes: of all parameters, by their names below the layer.
        names: ends of the names of those that are adapted.
    """
    chosen = [
        path
        for path in sorted(shapes, key=_definition_order)
        if any(f".{stem}.{path}".endswith(f".{name}") for name in names)
    ]
    modules = nested_modules(chosen)
    found: list[AdaptedParameter] = []
    for path in chosen:
        shape = shapes[path]
        count, rows, columns = shape if len(shape) == 3 else (1, *shape)
        transposed = len(shape) == 3 and family.transposed_experts
        if transposed:
            rows, columns = columns, rows
        found.append(
            AdaptedParameter(
                f"{stem}.{path}",
                f"{stem}.{modules[path]}",
                count,
                rows,
                columns,
                path.endswith(f".{FUSED}"),
                transposed,
            )
        )
    return found


def nested_modules(parameters: Iterable[str]) -> dict[str, str]:
    """Return the module of each parameter's adapter, of parameters in the order of definition."""
    owners: dict[str, list[str]] = {}
    for name in parameters:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: owner + ".base_layer" * (len(names) - 1 - place)
        for owner, names in owners.items()
        for place, name in enumerate(names)
    }


def _definition_order(path: str) -> tuple[str, int, str]:
    owner, _, last = path.rpartition(".")
    return owner, _ORDER.index(last) if last in _ORDER else len(_ORDER), last
