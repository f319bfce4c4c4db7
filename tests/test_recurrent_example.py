"""The example that trains a recurrent model: its pieces by hand-computed numbers, and a few updates."""

import importlib.util
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).resolve().parents[1] / "examples" / "recurrent_memory.py"
spec = importlib.util.spec_from_file_location("recurrent_memory", SOURCE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def test_text_repeats_with_its_period():
    tokens = example.text(np.random.default_rng(0), 3)
    assert tokens.shape == (3, example.SEGMENTS * example.SEGMENT + 1)
    assert (tokens[:, example.PERIOD :] == tokens[:, : -example.PERIOD]).all()


def test_gains_by_hand():
    """Two tokens are hard (loss 4 at context 1). Model 0 halves one of them at context 2; model 1 gains nothing."""
    short, better, same = (np.array(x) for x in ([4.0, 4.0, 0.0, 0.0], [2.0, 4.0, 9.0, 0.0], [5.0, 4.0, 0.0, 0.0]))
    gains = example.context_gains([{1: short, 2: better}, {1: short, 2: same}])
    assert gains == [{2: 0.25}, {2: 0.0}]
    assert [example.effective_context(row) for row in gains] == [2, 0]


def test_a_few_updates_lower_the_loss_and_masses_add_up_to_one():
    rng = np.random.default_rng(3)
    tokens = example.text(rng, 4)
    before = example.token_losses(example.initial(np.random.default_rng(1)), tokens, example.MEMORY).mean()
    parameters = example.train(example.MEMORY, 12, seed=1)
    assert example.token_losses(parameters, tokens, example.MEMORY).mean() < before
    mass = example.attention_mass(parameters, tokens)
    # per head and query the weights sum to 1; the longest distances are seen by some queries only
    assert mass.shape == (example.HEADS, example.MEMORY + example.SEGMENT)
    assert abs(mass[:, : example.MEMORY + 1].sum(-1).max() - 1) < 0.5
