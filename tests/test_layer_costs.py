"""Counts of multi-head and Talking-Heads calls against the multiplications that happen, of whole layers against the papers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import refattn as ra
from refattn.precision import counting

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures.py"
SMALL = {"layers": 12, "m": 512, "h": 8, "f": 2048, "q": 1}  # the small model of adaptive spans, one predicted token


def counted(mechanism, arguments, algorithm="auto"):
    """Multiply-adds of forward and of backward as the matrix products report them."""
    xp = counting()
    inside = {n: xp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    result, pullback = mechanism.vjp(**inside, algorithm=algorithm)
    forward = xp.counts.multiplies
    pullback(xp.ones(result.output.shape))
    return forward, xp.counts.multiplies - forward


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"zero_attention": True, "extra_key": True, "extra_value": True}]
)
def test_counted_multiplies_of_multi_head_attention(options):
    sizes = {"b": 2, "h": 4, "g": 2, "q": 40, "k": 40, "d": 3, "e": 5}
    none = dict.fromkeys(("b_q", "b_k", "b_v", "b_o"))
    arguments = ra.multi_head_attention.example(np.random.default_rng(0), **sizes, m=6, **none, **options)
    forward, backward = counted(ra.multi_head_attention, arguments)
    projections = 2 * 6 * (40 * 4 * 3 + 40 * 2 * 3 + 40 * 2 * 5 + 40 * 4 * 5)
    cost = ra.multi_head_attention.cost(**sizes, m=6, **options)
    assert forward == cost.computed_multiplies + projections
    both = ra.multi_head_attention.cost(**sizes, **options, direction="backward")
    assert backward == both.computed_multiplies + 2 * projections
    whole = ra.cost.transformer(b=2, m=6, h=4, g=2, q=40, d=3, e=5)
    assert whole.multiplies == ra.multi_head_attention.cost(**sizes).multiplies + projections
    assert whole.parameters == cost.parameters - (16 if "extra_key" in options else 0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("keys", [40, 2500])
def test_counted_multiplies_of_talking_heads_attention(keys, dynamic):
    """With 2500 keys the rows do not fit one block: the first walk computes their logits once more."""
    sizes = {"b": 1, "h": 3, "x": 2, "y": 4, "q": 9, "k": keys, "d": 3, "e": 5}
    drawn = dict.fromkeys(("query_logits", "key_logits", "query_weights", "key_weights"), True) if dynamic else {}
    arguments = ra.talking_heads_attention.example(np.random.default_rng(0), **sizes, **drawn)
    parts = {n: x for n, x in arguments.items() if n not in ("q", "k", "v")}
    forward, backward = counted(ra.talking_heads_attention, arguments)
    cost, back = (ra.talking_heads_attention.cost(**sizes, **parts, direction=d) for d in ("forward", "backward"))
    assert (forward, backward) == (cost.computed_multiplies, back.computed_multiplies)
    n = 3 if dynamic else 1
    assert cost.multiplies == 9 * keys * (2 * 3 + 4 * 5 + n * 3 * (2 + 4))
    assert cost.parameters == 2 * 3 + 3 * 4
    assert (cost.computed_multiplies > cost.multiplies) == (keys == 2500)


def test_talking_heads_without_projections_cost_what_attention_costs():
    sizes = {"h": 6, "q": 50, "k": 50, "d": 8, "e": 4, "causal": True}
    none = {"logits_projection": None, "weights_projection": None}
    plain = ra.scaled_dot_product_attention.cost(**sizes)
    assert ra.talking_heads_attention.cost(**sizes, **none).multiplies == plain.multiplies
    extra = (
        ra.talking_heads_attention.cost(**{**sizes, "e": 8}).multiplies
        / ra.scaled_dot_product_attention.cost(**{**sizes, "e": 8}).multiplies
    )
    assert extra == 1 + 6 / 8  # h / d


# ---------------------------------------------------------------------- whole layers


@pytest.mark.parametrize(
    ("heads", "extra", "share"),
    [(6, 18_874_368, 0.0117), (12, 75_497_472, 0.0469), (24, 301_989_888, 0.1875), (48, 1_207_959_552, 0.75)],
)
def test_talking_heads_layer(heads, extra, share):
    plain = ra.cost.transformer(m=768, h=heads, q=512)
    talking = ra.cost.transformer(m=768, h=heads, x=heads, y=heads, q=512)
    assert plain.multiplies == 1_610_612_736
    assert talking.multiplies - plain.multiplies == extra
    assert round(extra / plain.multiplies, 4) == share
    assert extra / (2 * 512 * 512 * 768) == heads / (768 // heads)
    assert talking.parameters - plain.parameters == 2 * heads**2
    assert plain.parameters == 4 * 768**2


def test_unequal_head_counts_and_lengths_by_the_formula():
    n, m, x, h, y, d, e, c = 7, 11, 2, 3, 4, 5, 6, 8
    want = d * x * (n * c + m * c + n * m) + e * y * (m * c + n * c + n * m) + n * m * h * (x + y)
    assert ra.cost.transformer(m=c, h=h, x=x, y=y, q=n, k=m, d=d, e=e).multiplies == want


def test_adaptive_span_figures():
    def multiplies(**changes):
        return ra.cost.transformer(**{**SMALL, **changes}).multiplies

    assert multiplies(span=314) == 12 * (4 * 512**2 + 2 * 512 * 2048 + 2 * 512 * 314)
    assert round(multiplies(span=314) / 1e6, 1) == 41.6
    assert round(1 - multiplies(span=256, f=0) / multiplies(span=256), 3) == 0.615  # said: 62%
    assert round(multiplies(span=8192, f=0) / multiplies(span=8192), 3) == 0.818  # said: 82%
    large = ra.cost.transformer(layers=24, m=768, h=8, f=4096, q=1, span=245)
    assert round(large.multiplies / 1e6, 1) == 216.6  # said: 179M, which no reading of the sizes gives
    assert round(large.parameters / 1e6) == 208  # said: 209M
    assert round(ra.cost.transformer(**SMALL).parameters / 1e6) == 38


def test_bert_base_memory_and_parameters():
    one = ra.cost.activations(m=768, h=12, q=512)
    assert one["k"] == 1.5 * 2**20
    assert one["k"] + one["v"] == 3 * 2**20
    assert one["weights"] == 12 * 2**20
    sizes = [ra.cost.activations(layers=12, m=768, h=12, q=n)["weights"] for n in (512, 1024, 2048)]
    assert [round(x / 1e6) for x in sizes] == [151, 604, 2416]
    assert sizes[2] == 4 * sizes[1] == 16 * sizes[0]
    assert ra.cost.activations(m=1, h=1, q=65536)["weights"] == 16 * 2**30
    layers = ra.cost.transformer(
        layers=12, m=768, h=12, q=512, f=3072, biases=True, norms=True, embeddings=30522 + 512 + 2
    )
    pooler, embedding_norm = 768 * 769, 2 * 768
    assert layers.parameters + pooler + embedding_norm == 109_482_240


def test_checkpoints_keep_the_layers_inputs_and_compute_them_twice():
    sizes = {"layers": 3, "b": 2, "m": 32, "h": 4, "q": 10, "f": 64}
    plain, kept = ra.cost.transformer(**sizes), ra.cost.transformer(**sizes, recompute=True)
    assert plain.saved_bytes == sum(ra.cost.activations(**sizes).values())
    assert kept.saved_bytes == ra.cost.activations(**sizes)["tokens"] == 3 * 2 * 10 * 32 * 4
    back, again = (ra.cost.transformer(**sizes, recompute=r, direction="backward") for r in (False, True))
    assert again.multiplies == back.multiplies + plain.multiplies
    both = ra.cost.transformer(**sizes, direction="both")
    assert both.multiplies == plain.multiplies + back.multiplies
    assert both.parameters == plain.parameters
    half = ra.cost.transformer(**sizes, dtype="bfloat16")
    assert half.saved_bytes * 2 == plain.saved_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h": 5}, "d is missing: m = 32 is not a multiple of the x = 5 heads"),
        ({"q": -1}, "q is -1"),
        ({"x": 4, "g": 2}, "g is 2: Talking-Heads"),
        ({"direction": "up"}, "direction is 'up'"),
    ],
)
def test_bad_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        ra.cost.transformer(**{"m": 32, "h": 4, "q": 10, **change})


def test_figures_are_printed_beside_what_the_sources_say():
    printed = subprocess.run([sys.executable, str(FIGURES)], capture_output=True, text=True, check=True).stdout
    for number in (
        "1.5 MiB",
        "3.0 MiB",
        "12 MiB",
        "151 MB",
        "604 MB",
        "2416 MB",
        "16 GiB",
        "1,610,612,736",
        "41.6M",
        "216.6M",
        "81.8%",
    ):
        assert number in printed
