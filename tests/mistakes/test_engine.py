"""The engine of mistakes: sides, lifting, and what a report prints, on a definition small enough to follow."""

import numpy as np
import pytest

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, einsum, step
from refattn.mistakes.engine import Case, Catalogue, differs, edited_steps, source_of_edit

dense = Catalogue(ScaledDotProduct)


@dense.mistake(why="The flag is lost on a side path.")
class causal_drop(ScaledDotProduct):
    """causal is ignored"""

    causal = False


@dense.mistake(sides=("backward",))
class delta_missing(ScaledDotProduct):
    """dS lacks the row term"""

    delta = 0.0


@dense.mistake(variants=[{"tile": 2}, {"tile": 4}])
class tail_dropped(ScaledDotProduct):
    """keys beyond the last full tile of {tile} keys
    are not read"""

    tile = 2

    @step
    def visible(self):
        return super().visible & (self.j < self.keys // self.tile * self.tile)


class Near(ScaledDotProduct):
    """Softmax attention over the two nearest keys."""

    @step
    def visible(self):
        return super().visible & (abs(self.ahead) < 2)


class Projected(Definition):
    """Softmax attention of x w with itself."""

    results = {"output": "output", "lse": "lse"}
    gradients = ("x", "w")
    defaults = {"causal": False}
    inner = ScaledDotProduct

    @step
    def q(self):
        return einsum("qm,mhd->hqd", self.x, self.w)

    @step
    def attention(self):
        return self.begin(self.inner, {"q": self.q, "k": self.q, "v": self.q, "causal": self.causal})

    @step
    def output(self):
        return self.attention.output

    @step
    def lse(self):
        return self.attention.lse

    @step
    def d_q(self):
        call = self.attention.pull(output=self.cotangent("output"), lse=self.cotangent("lse"))
        return call.d_q + call.d_k + call.d_v

    @step
    def d_x(self):
        return einsum("hqd,mhd->qm", self.d_q, self.w)

    @step
    def d_w(self):
        return einsum("qm,hqd->mhd", self.x, self.d_q)


def arguments(rng):
    return {n: rng.standard_normal((2, 5, 3)) for n in "qkv"} | {"causal": True}


def cotangents(rng):
    return {"output": rng.standard_normal((2, 5, 3)), "lse": rng.standard_normal((2, 5))}


def entry(catalogue, name):
    return next(m for m in catalogue if m.class_ == name)


def test_a_mistake_on_every_side():
    rng = np.random.default_rng(1)
    given, back = arguments(rng), cotangents(rng)
    case = Case(ScaledDotProduct, given, back)
    mistake = entry(dense, "causal_drop")
    plain = ScaledDotProduct(given | {"causal": False}, back)
    assert not differs(plain.result(), case.results(mistake))
    assert not differs(plain.gradient(), case.gradients(mistake))
    assert case.results(mistake, "backward") is None
    # A right backward is handed output and lse of the wrong forward: P = exp(S - lse) over the right keys.
    right = case.right
    p = np.where(right.seen, np.exp(right.logits - plain.lse[..., None]), 0)
    d_p = einsum("hqe,hke->hqk", back["output"], given["v"])
    delta = (back["output"] * plain.output).sum(-1, keepdims=True)
    d_s = p * (d_p - delta + back["lse"][..., None])
    want = {"q": 3**-0.5 * einsum("hqk,hkd->hqd", d_s, given["k"]), "v": einsum("hqk,hqe->hke", p, back["output"])}
    assert not differs(want, case.gradients(mistake, "forward"))
    # A backward that forgets causal is handed the right ones.
    p = np.exp(right.logits - right.lse[..., None])
    assert not differs({"v": einsum("hqk,hqe->hke", p, back["output"])}, case.gradients(mistake, "backward"))


def test_nothing_differs_where_the_mistake_does_not_show():
    rng = np.random.default_rng(2)
    case = Case(ScaledDotProduct, arguments(rng) | {"causal": False}, cotangents(rng))
    assert case.results(entry(dense, "causal_drop")) is None
    assert case.gradients(entry(dense, "causal_drop")) is None


def test_variants_say_which_they_are():
    assert [m.says for m in dense if m.class_ == "tail_dropped"] == [
        "keys beyond the last full tile of 2 keys are not read",
        "keys beyond the last full tile of 4 keys are not read",
    ]


@pytest.mark.parametrize("definition", [Near, Projected])
def test_mistakes_are_lifted(definition):
    rng = np.random.default_rng(3)
    catalogue = Catalogue(definition, built_on=dense, without=("delta_missing",))
    assert [m.class_ for m in catalogue] == ["causal_drop", "tail_dropped", "tail_dropped"]
    given = {"x": rng.standard_normal((5, 4)), "w": rng.standard_normal((4, 2, 3)), "causal": True}
    given = given if definition is Projected else arguments(rng)
    back = cotangents(rng)
    case = Case(definition, given, back)
    mistake = entry(catalogue, "causal_drop")
    want = definition(given | {"causal": False}, back)
    assert not differs(want.result(), case.results(mistake))
    assert not differs(want.gradient(), case.gradients(mistake))
    for side in ("forward", "backward"):
        assert differs(want.gradient(), case.gradients(mistake, side))


def test_sources_of_right_and_edited_step():
    mistake = entry(dense, "tail_dropped")
    assert edited_steps(mistake) == ["visible"]
    ((name, right, wrong),) = source_of_edit(mistake)
    assert name == "visible"
    assert "visible_by_causal" in right
    assert "super().visible" in wrong
    assert source_of_edit(entry(dense, "causal_drop")) == [("causal", "", "causal = False")]
    lifted = entry(Catalogue(Projected, built_on=dense), "delta_missing")
    assert source_of_edit(lifted)[0][2] == "delta = 0.0"


def test_mutations_are_the_public_records():
    rng = np.random.default_rng(4)
    given, back = arguments(rng), cotangents(rng)
    by_class = {m.class_: m for m in dense.mutations()}
    assert by_class["delta_missing"].forward is None
    assert set(by_class["delta_missing"].gradients(given, back)) == {"q", "k", "v"}
    assert by_class["causal_drop"].forward(given).output.shape == (2, 5, 3)


def test_a_mistake_in_some_rows_alone():
    rng = np.random.default_rng(5)
    given, back = arguments(rng), cotangents(rng)
    case = Case(ScaledDotProduct, given, back)
    mistake = entry(dense, "causal_drop")
    rows = np.zeros((2, 5), bool)
    rows[1, :3] = True
    results = case.results(mistake, rows=rows)
    whole = case.results(mistake)
    assert np.array_equal(results["output"][1, :3], whole["output"][1, :3])
    assert np.array_equal(results["output"][0], case.right.output[0])
    # By hand: the rows see everything, all others what they should.
    mask = np.tril(np.ones((5, 5), bool)) | rows[:, :, None]
    want = ScaledDotProduct({n: given[n] for n in "qkv"} | {"mask": mask}, back)
    assert not differs(want.result(), results)
    assert not differs(want.gradient(), case.gradients(mistake, rows=rows))
