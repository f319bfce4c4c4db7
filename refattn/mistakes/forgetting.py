"""How people get forgetting attention wrong: where the sum of the gates begins, over which tokens, and its gradient."""

import numpy as np

from refattn.definitions.forgetting import Forgetting
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(Forgetting, built_on=dense)


@catalogue.mistake(why="The running sum is read before its own token was added.")
class forget_off_by_one(Forgetting):
    """a key's own gate counts too: the sum begins at l = j"""

    @step
    def behind(self):
        return np.arange(self.own_keys)[None, :] >= np.arange(self.own_keys)[:, None]


@catalogue.mistake(why="An exclusive running sum at the query, an inclusive one at the key.", name="forget_off_by_one")
class own_token_left_out(Forgetting):
    """the gate of the query's own token is left out"""

    @step
    def decay(self):
        own = np.where(self.stands_at, np.asarray(self.log_forget)[..., None, :], 0.0).sum(-1, keepdims=True)
        return np.where(self.ahead < 0, super().decay - np.where(np.isfinite(own), own, 0.0), super().decay)


@catalogue.mistake(why="Gates and biases are multiplied by the scale together.")
class forget_scaled(Forgetting):
    """the decay is multiplied by the scale of the products"""

    @step
    def decay(self):
        return self.scale * super().decay

    @step
    def d_log_forget(self):
        return self.scale * super().d_log_forget


@catalogue.mistake(why="The gates are passed as decays, numbers above 0.")
class forget_sign(Forgetting):
    """the decay is added with the opposite sign"""

    @step
    def decay(self):
        return -super().decay

    @step
    def forgotten(self):
        return np.isneginf(-self.decay.real)

    @step
    def d_log_forget(self):
        return -super().d_log_forget


@catalogue.mistake(why="The branch without gates is taken.")
class forget_dropped(Forgetting):
    """the gates are ignored"""

    @step
    def decay(self):
        return np.zeros(self.own_pairs)

    @step
    def d_log_forget(self):
        return np.zeros(np.shape(self.log_forget))


@catalogue.mistake(why="Gates stand per key head in the cache.")
class forget_group(Forgetting):
    """the query heads of a group share the gates of the first of them"""

    @step
    def decay_to(self):
        first = np.array([int(np.flatnonzero(self.key_head == g)[0]) for g in self.key_head], dtype=int)
        return super().decay_to[..., first, :, :]


@catalogue.mistake(why="log(1 - f) and log f are taken for each other.", name="forget_not_a_log")
class gates_as_probabilities(Forgetting):
    """the gates are added as they are, not as logarithms"""

    @step
    def decay_to(self):
        gates = np.exp(np.asarray(self.log_forget))[..., None, :] - 1.0
        return np.cumsum(np.where(self.behind, gates, 0.0), axis=-1)


@catalogue.mistake(why="Queries are taken to stand at the first keys.", name="forget_align")
class gates_from_the_start(Forgetting):
    """the sum ends at query i of the keys, where fewer queries stand at their end"""

    @step
    def query_position(self):
        return np.clip(
            np.arange(self.queries)[:, None] + np.zeros_like(super().query_position), 0, max(0, self.own_keys - 1)
        )


@catalogue.mistake(why="Differences of running sums: -inf less -inf.", name="forget_minus_inf")
class minus_infinity_once(Forgetting):
    """a gate of 0 hides nothing: it is taken for 1"""

    @step
    def decay_to(self):
        gates = np.asarray(self.log_forget)[..., None, :]
        return np.cumsum(np.where(self.behind & np.isfinite(gates), gates, 0.0), axis=-1)


@catalogue.mistake(
    why="Rowsum(dS) is 0 without sinks and without a cotangent of the lse.",
    sides=("backward",),
    name="forget_grad_rows",
)
class gate_gradient_by_columns(Forgetting):
    """the gates' gradient counts the keys alone, as if the rows of dlogits summed to 0"""

    @step
    def d_log_forget(self):
        by_key = -self.d_own_added.sum(-2)
        suffix = np.flip(np.cumsum(np.flip(by_key, -1), -1), -1)
        return np.where(np.isneginf(np.real(self.log_forget)), 0.0, suffix)


@catalogue.mistake(
    why="The sum over tokens runs the other way in the backward.", sides=("backward",), name="forget_grad"
)
class gate_gradient_summed_forwards(Forgetting):
    """the gates' gradient is summed from the first token on, not from the last"""

    @step
    def d_log_forget(self):
        return np.flip(super().d_log_forget, -1)


@catalogue.mistake(
    why="The gates come from a layer that is trained elsewhere.", sides=("backward",), name="forget_grad"
)
class gate_gradient_dropped(Forgetting):
    """the gates' gradient is 0"""

    @step
    def d_log_forget(self):
        return np.zeros(np.shape(self.log_forget))
