"""``{mechanism} name``: what a registered mechanism says of itself, so that its page cannot disagree with its code."""

import inspect
from collections.abc import Iterator

from docutils.nodes import Element, Node
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from refattn.mechanism import Mechanism, mechanisms


def facts(mechanism: Mechanism) -> Iterator[str]:
    """Markdown lines: equation, signature, axes, gradients, known mistakes."""
    yield from ("```text", *inspect.cleandoc(mechanism.equation).splitlines(), "```", "")
    yield from (f"Source: {mechanism.paper}", "")
    parameters = inspect.signature(mechanism).parameters.values()
    arguments = ", ".join(f"`{p.name}`" for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    options = ", ".join(f"`{p.name}`" for p in parameters if p.kind is p.KEYWORD_ONLY)
    yield from (f"**Arrays**: {arguments}", "", f"**Options**: {options}", "")
    yield from ("**Gradients** with respect to " + ", ".join(f"`{name}`" for name in mechanism.differentiable), "")
    yield from ("**Cotangents** taken for " + ", ".join(f"`{name}`" for name in mechanism.outputs), "")
    yield from (
        "| letter | axis |",
        "|---|---|",
        *(f"| `{letter}` | {axis} |" for letter, axis in mechanism.axes.items()),
        "",
    )
    yield from ("Mistakes that the verifier can name:", "", "| class | what is wrong |", "|---|---|")
    yield from (f"| `{mutation.class_}` | {mutation.says} |" for mutation in mechanism.mutations)
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
