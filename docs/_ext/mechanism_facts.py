"""``{mechanism} name``: what a registered mechanism says of itself, so that its page cannot disagree with its code."""

import inspect
import re
from collections.abc import Iterator

from docutils.nodes import Element, Node
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from refattn.mechanism import Mechanism, mechanisms

WAYS_SHOWN = 3


def facts(mechanism: Mechanism) -> Iterator[str]:
    """Markdown lines: equation, source, gradients, axes, known mistakes."""
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
    for name, ways in kinds.items():
        more = f"; {len(ways) - WAYS_SHOWN} more of the kind" if len(ways) > WAYS_SHOWN else ""
        yield f"| `{name}` | {'; '.join(ways[:WAYS_SHOWN])}{more} |"
    yield ""


class MechanismDirective(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[Node]:
        mechanism = mechanisms[self.arguments[0]]
        container = Element()
        self.state.nested_parse(StringList(list(facts(mechanism)), source=self.env.docname), 0, container)
        return list(container.children)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("mechanism", MechanismDirective)
    return {"parallel_read_safe": True}
