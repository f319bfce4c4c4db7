"""What the presets of recurrences share: names on both sides, and switches that are always on."""

from collections.abc import Mapping
from typing import Any

from refattn.verification.conventions.presets.preset import Preset
from refattn.verification.conventions.record import Conventions

__all__ = ["BLOCK", "recurrent"]

BLOCK = 16
"""What a chunk size is given as, where a signature wants one."""

SWITCHES = ("output_final_state", "return_final_states")


def recurrent(
    name: str,
    says: str,
    mechanisms: tuple[str, ...],
    *,
    arrays: Mapping[str, str] | None = None,
    names: Mapping[str, str],
    signs: tuple[frozenset[str], ...],
    conventions: Mapping[str, Any] | None = None,
    layout: str = "blhd",
    always: Mapping[str, Any] | None = None,
    by_name: bool = False,
    packed: bool = False,
    framework: str = "torch",
    requires: Mapping[str, tuple[str, ...]] | None = None,
) -> Preset:
    """A preset whose call is renaming alone.

    ``arrays``: their names of our arrays by position; ``names``: of our options; ``always``: arguments passed wherever the
    signature names them.
    """
    own = dict(arrays or {"q": "q", "k": "k", "v": "v"})
    more = dict.fromkeys(SWITCHES, True) | dict(always or {})

    def translate(options: dict[str, Any], given: dict[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
        call = {names[n]: x for n, x in options.items() if n in names}
        call |= {n: x for n, x in more.items() if n in has}
        return call | {own[n]: x for n, x in given.items()} if by_name else call

    return Preset(
        name=name,
        says=says,
        conventions=Conventions(preset=name, **(conventions or {})),
        framework=framework,
        layout=layout,
        parameters=(*own.values(), *names.values(), *more),
        signs=signs,
        names=names,
        translate=translate,
        results=("output", "state"),
        mechanisms=mechanisms,
        arrays=own,
        by_name=by_name,
        packed=packed,
        requires=dict(requires or {}),
    )
