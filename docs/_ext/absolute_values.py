"""Let docstrings write absolute values as mathematics does: |x| with no substitution of that name is text."""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class AbsoluteValues(SphinxTransform):
    default_priority = 215  # after Sphinx's own substitutions, before docutils complains of unknown ones

    def apply(self) -> None:
        for reference in list(self.document.findall(nodes.substitution_reference)):
            if reference["refname"] not in self.document.substitution_defs:
                reference.replace_self(nodes.Text(f"|{reference.astext()}|"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(AbsoluteValues)
    return {"parallel_read_safe": True}
