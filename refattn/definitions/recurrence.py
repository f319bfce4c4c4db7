"""What the recurrences have in common, token by token: arguments, heads, padding, and the walk forward and back.

    S_t = advance(S_{t-1}, t)      output = scale * q . S_t      dS_{t-1} = retreat(dS_t, t)

Axes: ``...`` any leading batch axes, ``g`` state head, ``n`` output head, ``t`` row, ``d`` key channel, ``e`` value channel.
"""

import numpy as np

from refattn.definitions.scaled_dot_product import per_batch
from refattn.definitions.steps import Definition, einsum, step

__all__ = ["Recurrence", "add_heads", "reciprocal_length"]


class Recurrence(Definition):
    """One state per value head; a subclass says how a token changes it (``advance``) and what that sends back (``retreat``)."""

    results = {"output": "output", "state": "final_state"}
    defaults = {
        "decay": None, "channel_decay": None, "head_decay": None, "scale": None, "state": None, "lengths": None,
        "reset": None, "head_map": "repeat", "form": None, "chunk": None, "steps": 1, "read": "after", "bonus": None,
    }  # fmt: skip
    shared = ("q", "k", "v")  # arrays whose leading axes broadcast

    # ------------------------------------------------------------------ sizes and heads

    @step
    def lead(self):
        """The batch axes of all arrays together."""
        arrays = [(self.argument(n), 3) for n in (*self.shared, "channel_decay", "state")]
        arrays += [(self.argument(n), 2) for n in ("decay", "beta")] + [(self.reset, 1)]
        return np.broadcast_shapes(*(x.shape[: x.ndim - axes] for x, axes in arrays if x is not None))

    @property
    def tokens(self):
        return self.q.shape[-2]

    @property
    def rows(self):
        return self.tokens * self.steps

    @property
    def channels(self):
        return self.k.shape[-1]

    @step
    def states_of_values(self):
        """g"""
        return self.v.shape[-3]

    @step
    def reads_of_heads(self):
        """(n,) for each output head: the state that it reads."""
        return head_of(max(self.q.shape[-3], self.states_of_values), self.states_of_values, self.head_map)

    @step
    def queries_of_heads(self):
        """(n,) for each output head: its head of q."""
        return head_of(max(self.q.shape[-3], self.states_of_values), self.q.shape[-3], self.head_map)

    @step
    def keys_of_heads(self):
        """For each state the head of an array with fewer of them, a function of how many it has."""
        states, head_map = self.states_of_values, self.head_map
        return lambda heads: head_of(states, heads, head_map)

    # ------------------------------------------------------------------ reading the arguments

    @step
    def scale(self):
        given = self.argument("scale")
        return self.default_scale if given is None else np.reshape(given, ())[()]

    @step
    def default_scale(self):
        """d**-0.5"""
        return self.q.shape[-1] ** -0.5 if self.q.shape[-1] else 1.0

    @step
    def real(self):
        """(..., 1, t, 1): tokens that are no padding."""
        if self.lengths is None:
            return np.ones((1, self.tokens, 1), dtype=bool)
        return np.arange(self.tokens)[:, None] < per_batch(self.lengths, self.lead)

    @step
    def real_rows(self):
        return np.repeat(self.real, self.steps, axis=-2)

    @step
    def emptied(self):
        """(..., 1, rows): the state is 0 before these rows."""
        found = np.zeros((*(1,) * len(self.lead), 1, self.rows), dtype=bool)
        if self.reset is None:
            return found
        marks = np.zeros((*self.reset.shape[:-1], 1, self.rows), dtype=bool)
        marks[..., 0, :: self.steps] = self.reset
        return marks & self.real_rows[..., 0]

    @step
    def plain_queries(self):
        """q, at the output heads."""
        return np.take(np.where(self.real, self.q, 0.0), self.queries_of_heads, axis=-3)

    @step
    def queries(self):
        """scale q"""
        return self.scale * self.plain_queries

    @step
    def keys(self):
        return self.at_states(self.k)

    @step
    def values(self):
        return self.at_states(self.v)

    def at_states(self, x):
        """An array of rows, 0 in padding, at the state heads."""
        return np.take(np.where(self.real_rows, x, 0.0), self.keys_of_heads(x.shape[-3]), axis=-3)

    def from_states(self, d, x):
        """The adjoint of ``at_states``: the gradient of a shared head is a sum."""
        return self.heads_added(np.where(self.real_rows, d, 0.0), self.keys_of_heads(x.shape[-3]), x.shape[-3])

    @step
    def heads_added(self):
        """How the gradients of a head's several readers become its own: a sum."""
        return add_heads

    @step
    def token_decay(self):
        """(..., g, t, d): the sum of the decays that are given."""
        total = np.zeros((*self.lead, self.states_of_values, self.tokens, self.channels))
        if self.decay is not None:
            total = total + self.decay[..., None]
        if self.channel_decay is not None:
            total = total + self.channel_decay
        if self.head_decay is not None:
            total = total + self.head_decay[:, None, None]
        return np.where(self.real, total, 0.0)

    @step
    def log_decay(self):
        """(..., g, rows, d): the decays of tokens at their first rows."""
        total = self.token_decay
        if self.steps == 1:
            return total
        found = np.zeros((*total.shape[:-2], self.rows, total.shape[-1]))
        found[..., :: self.steps, :] = total
        return found

    @step
    def factors(self):
        """exp(gamma)"""
        return np.exp(self.log_decay)

    @step
    def start_state(self):
        shape = (*self.lead, self.states_of_values, self.channels, self.v.shape[-1])
        return np.broadcast_to(0.0 if self.state is None else self.state, shape)

    # ------------------------------------------------------------------ forward

    @step
    def advance(self):
        """A function of the state before a row, and the row."""
        raise NotImplementedError

    @step
    def entering(self):
        """The state before each row, after a reset, (rows, ..., g, d, e)."""
        return self.walked[0]

    @step
    def states(self):
        """The state behind each row, (rows, ..., g, d, e)."""
        return self.walked[1]

    @step
    def walked(self):
        """All states before and behind a row."""
        before, after, state = [], [], self.start_state
        for t in range(self.rows):
            before.append(np.where(self.emptied[..., t, None, None], 0.0, state))
            state = self.advance(before[-1], t)
            after.append(state)
        shape = (0, *self.start_state.shape)
        return [np.stack(x) if x else np.zeros(shape) for x in (before, after)]

    @step
    def final_state(self):
        return self.states[self.final_rows - 1] if self.final_rows else self.start_state + 0

    @step
    def final_rows(self):
        """Rows that have entered the final state."""
        return self.rows

    @step
    def read_states(self):
        """What the queries read, (..., n, t, d, e): the state behind their token's last row."""
        return self.at_outputs(self.states[self.steps - 1 :: self.steps])

    def at_outputs(self, states):
        """(t, ..., g, d, e) as (..., n, t, d, e)."""
        return np.take(np.moveaxis(states, 0, -3), self.reads_of_heads, axis=-4)

    @step
    def output(self):
        """q . S"""
        return np.where(self.real, einsum("...td,...tde->...te", self.queries, self.read_states), 0.0)

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        return np.where(self.real, self.cotangent("output"), 0.0)

    @step
    def d_final_state(self):
        return self.cotangent("state")

    @step
    def d_queries(self):
        """S dO"""
        return einsum("...te,...tde->...td", self.d_output, self.read_states)

    @step
    def d_read_states(self):
        """q dO^T, added up at the states: (rows, ..., g, d, e)."""
        own = einsum("...td,...te->...tde", self.queries, self.d_output)
        added = np.moveaxis(add_heads(own, self.reads_of_heads, self.states_of_values, axis=-4), -3, 0)
        found = np.zeros((self.rows, *added.shape[1:]))
        found[self.steps - 1 :: self.steps] = added
        return found

    @step
    def retreat(self):
        """A function of the cotangent of the state behind a row, and the row: that of the state before it."""
        raise NotImplementedError

    @step
    def d_walked(self):
        """Cotangents of the states behind all rows, and of the first state of all."""
        d_state, found = np.zeros(self.start_state.shape), []
        for t in range(self.rows - 1, -1, -1):
            if t == self.final_rows - 1:
                d_state = d_state + self.d_final_state
            if self.read == "after":
                d_state = d_state + self.d_read_states[t]
            found.append(d_state)
            d_state = self.retreat(d_state, t)
            if self.read == "before":
                d_state = d_state + self.d_read_states[t]
            d_state = np.where(self.emptied[..., t, None, None], 0.0, d_state)
        if not self.final_rows:
            d_state = d_state + self.d_final_state
        return (np.stack(found[::-1]) if found else np.zeros((0, *np.shape(d_state)))), d_state

    @step
    def d_states(self):
        """dS behind each row, (rows, ..., g, d, e)."""
        return self.d_walked[0]

    @step
    def d_q(self):
        d = self.d_plain_queries
        return np.where(self.real, self.heads_added(d, self.queries_of_heads, self.q.shape[-3]), 0.0)

    @step
    def d_plain_queries(self):
        """scale dq"""
        return self.scale * self.d_queries

    @step
    def d_scale(self):
        return (self.d_queries * self.plain_queries).sum()

    @step
    def d_decayed(self):
        """Cotangent of exp(gamma) S, (rows, ..., g, d, e)."""
        return self.d_states

    @step
    def d_log_decay(self):
        """sum over e of the cotangent of exp(gamma) S, times it"""
        terms = (self.d_decayed * self.entering).sum(-1)
        return np.moveaxis(terms, 0, -2) * self.factors

    @step
    def d_token_decay(self):
        return np.where(self.real, self.d_log_decay[..., :: self.steps, :], 0.0)

    @step
    def d_decay(self):
        return self.d_token_decay.sum(-1)

    @step
    def d_channel_decay(self):
        return self.d_token_decay

    @step
    def d_head_decay(self):
        return einsum("...gtd->g", self.d_token_decay)

    @step
    def d_state(self):
        return self.d_walked[1]


def head_of(heads, others, head_map):
    """(heads,) ints: where there are fewer of the others, the one that each uses; tile: i modulo their number."""
    if others >= heads or not others:
        return np.arange(heads) % max(others, 1)
    return np.arange(heads) % others if head_map == "tile" else np.arange(heads) // (heads // others)


def add_heads(d, of, heads, axis=-3):
    """Rows of heads added up at the heads that they were taken from."""
    d = np.moveaxis(np.asarray(d), axis, 0)
    found = np.zeros((heads, *d.shape[1:]), dtype=d.dtype)
    for i, n in enumerate(of):
        found[n] += d[i]
    return np.moveaxis(found, 0, axis)


def reciprocal_length(x, kind, eps):
    """1 / sqrt(sum x^2 + eps), or 1 / max(|x|, eps); 0 for 1 / 0."""
    squares = (x * x).sum(-1, keepdims=True)
    length = np.sqrt(squares + eps) if kind == "l2_sum" else np.maximum(np.sqrt(squares), eps)
    return np.where(length == 0, 0.0, 1 / np.where(length == 0, 1.0, length))
