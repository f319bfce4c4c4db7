"""Pages that cannot disagree with the code: ``{mechanism} name``, ``{public} module``, ``{thresholds} module``.

What a registered mechanism says of itself; every name in a module's ``__all__``; what the verifier lets pass.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator

from docutils.nodes import Element, Node
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from refattn.mechanism import mechanisms

WAYS_SHOWN = 3


def facts(name: str) -> Iterator[str]:
    """Markdown lines: equation, source, gradients, axes, known mistakes."""
    mechanism = mechanisms[name]
    yield from ("```text", *inspect.cleandoc(mechanism.equation).splitlines(), "```", "")
    yield from (f"Source: {mechanism.paper}", "")
    yield from ("**Gradients** with respect to " + ", ".join(f"`{name}`" for name in mechanism.differentiable), "")
    yield from ("**Cotangents** taken for " + ", ".join(f"`{name}`" for name in mechanism.outputs), "")
    yield from (
        "| letter | axis |",
        "|---|---|",
        *(f"| `{letter}` | {axis} |" for letter, axis in mechanism.axes.items()),
        "",
    )
    yield from ("Mistakes that the verifier can name:", "", "| class | what is wrong |", "|---|---|")
    kinds: dict[str, list[str]] = {}
    for mutation in mechanism.mutations:
        kinds.setdefault(mutation.class_, []).append(re.sub(r"([*_|<])", r"\\\1", mutation.says))
    for kind, ways in kinds.items():
        more = f"; {len(ways) - WAYS_SHOWN} more of the kind" if len(ways) > WAYS_SHOWN else ""
        yield f"| `{kind}` | {'; '.join(ways[:WAYS_SHOWN])}{more} |"
    yield ""


def entries(module_name: str) -> Iterator[str]:
    """Markdown lines: the module's docstring, then autodoc of each public name."""
    module = importlib.import_module(module_name)
    yield from ("```{eval-rst}", f".. automodule:: {module_name}", "")
    for name in module.__all__:
        value = getattr(module, name)
        kind = "autoclass" if isinstance(value, type) else "autofunction" if callable(value) else "autodata"
        yield from (f".. {kind}:: {module_name}.{name}", "   :members:" if kind == "autoclass" else "", "")
    yield "```"


def thresholds(module_name: str) -> Iterator[str]:
    """Markdown table of the largest and the median error, in bounds, that still pass."""
    table = importlib.import_module(module_name).THRESHOLDS
    yield from ("| precision | bound | maximum | median |", "|---|---|---|---|")
    for precision, kinds in table.items():
        for kind, (maximum, median) in kinds.items():
            yield f"| {precision} | {kind} | {maximum:g} | {median:g} |"


class FromThePackage(SphinxDirective):
    """Markdown lines made of the argument, read where the directive stands."""

    required_arguments = 1
    lines: Callable[[str], Iterator[str]]

    def run(self) -> list[Node]:
        container = Element()
        made = StringList(list(self.lines(self.arguments[0])), source=self.env.docname)
        self.state.nested_parse(made, 0, container)
        return list(container.children)


class MechanismDirective(FromThePackage):
    lines = staticmethod(facts)


class PublicDirective(FromThePackage):
    lines = staticmethod(entries)


class ThresholdsDirective(FromThePackage):
    lines = staticmethod(thresholds)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("mechanism", MechanismDirective)
    app.add_directive("public", PublicDirective)
    app.add_directive("thresholds", ThresholdsDirective)
    return {"parallel_read_safe": True}
