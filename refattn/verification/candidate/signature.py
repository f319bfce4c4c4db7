"""What a callable's signature takes, and what a candidate can be asked."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from refattn.verification.conventions import PRESETS

__all__ = ["Acceptance", "Signature"]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The options a callable takes: parameter names after the arrays, with defaults; ``any`` = ``**kwargs``."""

    names: Mapping[str, Any]
    any: bool
    module: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], arrays: int) -> "Signature | None":
        """The signature, or None where Python cannot tell (functions written in C)."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return None
        module = bool(parameters) and parameters[0].name == "module"
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        taken = {p.name for p in by_position[: arrays + module]}
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
        names = {p.name: p.default for p in parameters if p.name not in taken and p.kind not in variable}
        return cls(names, any(p.kind is p.VAR_KEYWORD for p in parameters), module)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What a candidate can be asked, known without its being loaded here."""

    names: tuple[str, ...] | None  # None: unknown, everything is tried
    any: bool
    preset: str | None  # the preset whose call translation is in use
    rename: Mapping[str, str]
    supports: tuple[str, ...] | None
    built_in: tuple[str, ...] = ()  # options that the target was built with: neither handed over nor refused

    def takes(self, name: str) -> bool:
        """Whether the signature, or what was said by hand, names a convention option."""
        if self.supports is not None and name in self.supports:
            return True
        return self.preset is None and self.names is not None and self.rename.get(name, name) in self.names

    def mentions(self, name: str) -> bool:
        """Whether an option is known to be there: named by the signature or said by hand."""
        if self.supports is not None:
            return name in self.supports
        if self.preset is not None:
            return False  # one of its parameters may stand for several options
        return self.names is not None and self.rename.get(name, name) in self.names

    def refusal(self, name: str) -> str | None:
        """Why the option cannot be asked for, or None."""
        if name in self.built_in:
            return None
        if self.supports is not None and name not in self.supports:
            return f"{name} is not among the options that are supported"
        if self.preset is not None:
            theirs = self.rename.get(name) or PRESETS[self.preset].names.get(name)
            if theirs is None or (name not in self.rename and theirs in self.rename.values()):
                return f"{PRESETS[self.preset].says} has no {name}"
            known = self.names is None or theirs in self.names or self.any
            return None if known else f"its signature has no {theirs}"
        theirs = self.rename.get(name, name)
        if self.names is None or self.any or theirs in self.names:
            return None
        return f"its signature has no {theirs}"
