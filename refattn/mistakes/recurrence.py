"""How people get recurrences wrong, whatever a token does to the state: decays, heads, scale, state, chunks, padding, gradients."""

import ml_dtypes
import numpy as np

from refattn.definitions.recurrence import Recurrence
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue

catalogue = Catalogue(Recurrence)

CHUNKS = [{"size": n} for n in (16, 64)]
LN2 = float(np.log(2.0))

# ---------------------------------------------------------------------------------------------- decays


@catalogue.mistake(why="Kernels take exp2, and the factor 1/ln 2 belongs in the gate: once, on one side.")
class decay_base(Recurrence):
    """decays are powers of 2 of the logs in place of powers of e"""

    @step
    def log_decay(self):
        return LN2 * super().log_decay

    @step
    def d_token_decay(self):
        return LN2 * super().d_token_decay


@catalogue.mistake(
    name="decay_base", why="The gate is multiplied by log2(e), and the kernel's exponential is the natural one."
)
class decay_base_twice(Recurrence):
    """the logs of decays are multiplied by log2(e) and taken as natural ones"""

    @step
    def log_decay(self):
        return super().log_decay / LN2

    @step
    def d_token_decay(self):
        return super().d_token_decay / LN2


@catalogue.mistake(why="A path for ungated models is taken, or the gate is an optional argument that is not handed on.")
class decay_dropped(Recurrence):
    """the state does not decay"""

    @step
    def log_decay(self):
        return 0.0 * np.where(np.isfinite(super().log_decay), super().log_decay, 0.0)

    @step
    def d_token_decay(self):
        return np.zeros_like(super().d_token_decay)


@catalogue.mistake(why="With a state of 0 it makes no difference.")
class decay_first_step(Recurrence):
    """the first token does not decay the initial state"""

    @step
    def log_decay(self):
        return np.where(np.arange(self.rows)[:, None] == 0, 0.0, super().log_decay)

    @step
    def d_token_decay(self):
        return np.where(np.arange(self.tokens)[:, None] == 0, 0.0, super().d_token_decay)


@catalogue.mistake(why="A kernel for one decay a head is called with a decay for each channel, and loads the first.")
class decay_channel_shared(Recurrence):
    """the decay of the first channel is used for all channels"""

    @step
    def log_decay(self):
        right = super().log_decay
        return np.broadcast_to(right[..., :1], right.shape)

    @step
    def d_token_decay(self):
        d = super().d_token_decay
        first = np.arange(d.shape[-1]) == 0
        return np.where(first, d.sum(-1, keepdims=True), 0.0)


@catalogue.mistake(why="RWKV keeps w and computes exp(-exp(w)) inside; others hand over the log itself.")
class gate_raw(Recurrence):
    """decays are exp(-exp(g)) of the logs g that are given"""

    @step
    def token_decay(self):
        return np.where(self.real, -np.exp(super().token_decay), 0.0)

    @step
    def d_token_decay(self):
        return super().d_token_decay * self.token_decay


@catalogue.mistake(why="A guard against positive exponents that is written with < in place of <=.")
class safe_exp(Recurrence):
    """a log decay of exactly 0 counts as a decay to nothing"""

    @step
    def factors(self):
        given = [self.decay, self.channel_decay, self.head_decay]
        right = super().factors
        return right if all(x is None for x in given) else np.where(self.log_decay == 0, 0.0, right)


@catalogue.mistake(sides=("backward",), why="dgamma is computed as the running sum of q dq - k dk, without its end.")
class dgamma_state_term(Recurrence):
    """the gradient of the decays leaves out what the final state's cotangent sends to all of them"""

    @step
    def d_log_decay(self):
        end = (self.d_final_state * self.final_state).sum(-1)[..., None, :]
        return super().d_log_decay - end


@catalogue.mistake(
    sides=("backward",),
    why="The exponential of hidden pairs overflows; the forward masks it, the backward has 0 times inf.",
)
class exp_before_mask(Recurrence):
    """the gradient of the decays is NaN in chunks of 64 whose decays add up to more than a number's range"""

    @step
    def d_log_decay(self):
        return np.where(overflowing(self), np.nan, super().d_log_decay)


@catalogue.mistake(why="exp(G_i - G_j) is computed as exp(G_i) / exp(G_j), as the paper writes it.")
class cumulative_quotient(Recurrence):
    """the output is NaN in chunks of 64 whose decays add up to more than a number's range"""

    @step
    def output(self):
        rows = overflowing(self).any(-1, keepdims=True)[..., self.steps - 1 :: self.steps, :]
        lost = np.take(rows, self.reads_of_heads, axis=-3)
        return np.where(lost & self.real, np.nan, super().output)


def overflowing(call):
    """(..., g, rows, d): rows of a chunk of 64 behind a sum of decays whose inverse overflows in the storage dtype."""
    limit = float(np.log(float(ml_dtypes.finfo(call.storage).max)))
    found = np.zeros(call.log_decay.shape, dtype=bool)
    for start in range(0, call.rows, 64):
        rows = slice(start, start + 64)
        found[..., rows, :] = -np.cumsum(call.log_decay[..., rows, :], axis=-2) > limit
    return found


# ---------------------------------------------------------------------------------------------- heads, scale


@catalogue.mistake(why="repeat and repeat_interleave: two functions, both right somewhere.")
class gva_tile(Recurrence):
    """a shared head is assigned modulo the number of heads in place of in groups, or the other way round"""

    @step
    def head_map(self):
        return "repeat" if self.argument("head_map") == "tile" else "tile"


@catalogue.mistake(
    sides=("backward",), why="Each value head writes the gradient of its key head, and the last one stays."
)
class gva_grad_nosum(Recurrence):
    """the gradient of a shared head is that of one of its readers in place of their sum"""

    @step
    def heads_added(self):
        return last_head


def last_head(d, of, heads):
    found = np.zeros((*d.shape[:-3], heads, *d.shape[-2:]))
    for i, n in enumerate(of):
        found[..., n, :, :] = d[..., i, :, :]
    return found


@catalogue.mistake(why="The head size that is at hand is that of the values.")
class scale_from_e(Recurrence):
    """the default scale is e**-0.5 in place of d**-0.5"""

    @step
    def default_scale(self):
        return self.v.shape[-1] ** -0.5


@catalogue.mistake(why="The layer scales, and so does the kernel.")
class scale_twice(Recurrence):
    """queries are scaled twice"""

    @step
    def queries(self):
        return self.scale * super().queries

    @step
    def d_plain_queries(self):
        return self.scale * super().d_plain_queries

    @step
    def d_scale(self):
        return 2 * self.scale * super().d_scale


@catalogue.mistake(why="Mamba, RWKV and MiniMax have none.")
class scale_missing(Recurrence):
    """queries are not scaled"""

    scale = 1.0
    d_scale = 0.0


@catalogue.mistake(why="Another library scales the key.")
class scale_on_k_too(Recurrence):
    """keys are scaled as well as queries"""

    @step
    def keys(self):
        return self.scale * super().keys

    @step
    def d_keys(self):
        return self.scale * super().d_keys

    @step
    def d_scale(self):
        return super().d_scale + (super().d_keys * super().keys).sum()


@catalogue.mistake(why="Masked attention includes the diagonal; a loop that reads first does not.")
class read_before_write(Recurrence):
    """a query reads the state before its own token has decayed it and written"""

    @step
    def read_states(self):
        return self.at_outputs(self.entering[:: self.steps]) if self.read == "after" else super().read_states

    @step
    def d_walked(self):
        return before_write(self) if self.read == "after" else super().d_walked


def before_write(call):
    d_state, found = np.zeros(call.start_state.shape), []
    own = call.d_read_states[call.steps - 1 :: call.steps]
    for t in range(call.rows - 1, -1, -1):
        d_state = d_state + (call.d_final_state if t == call.rows - 1 else 0.0)
        found.append(d_state)
        d_state = call.retreat(d_state, t) + (own[t // call.steps] if t % call.steps == 0 else 0.0)
        d_state = np.where(call.emptied[..., t, None, None], 0.0, d_state)
    return np.stack(found[::-1]), d_state


# ---------------------------------------------------------------------------------------------- the state


@catalogue.mistake(why="Prefill never had one.")
class state_ignored(Recurrence):
    """the initial state is not used"""

    state = None

    @step
    def d_state(self):
        return np.zeros(np.shape(self.argument("state")))


@catalogue.mistake(why="One library keeps states as (d, e), another as (e, d).")
class state_transposed(Recurrence):
    """the initial state is read transposed"""

    @step
    def start_state(self):
        right = super().start_state
        return np.swapaxes(right, -1, -2) if right.shape[-1] == right.shape[-2] else right

    @step
    def d_state(self):
        d = super().d_state
        return np.swapaxes(d, -1, -2) if d.shape[-1] == d.shape[-2] else d


@catalogue.mistake(name="state_transposed", why="The final state is stored in the layout of the registers.")
class final_state_transposed(Recurrence):
    """the final state is handed out transposed"""

    @step
    def final_state(self):
        right = super().final_state
        return np.swapaxes(right, -1, -2) if right.shape[-1] == right.shape[-2] else right

    @step
    def d_final_state(self):
        d = super().d_final_state
        return np.swapaxes(d, -1, -2) if d.shape[-1] == d.shape[-2] else d


@catalogue.mistake(why="The loop over chunks sums along the wrong axis, or starts each from zeros.", variants=CHUNKS)
class state_lost_at_chunk(Recurrence):
    """each chunk of {size} rows starts from an empty state"""

    size = 16

    @step
    def emptied(self):
        starts = (np.arange(self.rows) % self.size == 0) & (np.arange(self.rows) > 0)
        return super().emptied | starts


@catalogue.mistake(
    sides=("both", "forward"),
    why="The decay of the last chunk is read at the last row of a whole one, where nothing stands.",
    variants=CHUNKS,
)
class state_tail_decay(Recurrence):
    """of a short last chunk of {size} rows the final state lacks the decay"""

    size = 16

    @step
    def tail(self):
        """(rows, 1) bool"""
        start = self.rows // self.size * self.size
        return (np.arange(self.rows) >= start)[:, None]

    @step
    def undecayed(self):
        """exp(-G) of the tail, (..., g, d, 1)"""
        return np.exp(-np.where(self.tail, self.log_decay, 0.0).sum(-2))[..., None]

    @step
    def final_state(self):
        return self.undecayed * super().final_state

    @step
    def d_final_state(self):
        return self.undecayed * super().d_final_state

    @step
    def d_log_decay(self):
        end = (super().d_final_state * self.final_state).sum(-1)[..., None, :]
        return super().d_log_decay - np.where(self.tail, end, 0.0)


@catalogue.mistake(
    sides=("both", "forward"),
    why="The loop over chunks hands out the state that it entered the last one with.",
    variants=CHUNKS,
)
class state_without_last_chunk(Recurrence):
    """the final state leaves out the last chunk of {size} rows"""

    size = 16

    @step
    def final_rows(self):
        return max(0, self.rows - 1) // self.size * self.size


@catalogue.mistake(why="The cache has the dtype of the activations.")
class state_low_precision(Recurrence):
    """the state is rounded to bfloat16 after every token"""

    @step
    def advance(self):
        right = super().advance
        return lambda state, t: right(state, t).astype(ml_dtypes.bfloat16).astype(np.float64)


# ---------------------------------------------------------------------------------------------- padding, documents


@catalogue.mistake(why="k and v are masked, the gate is not.")
class padding_decays(Recurrence):
    """padded tokens still decay the state"""

    @step
    def token_decay(self):
        total = np.zeros((*self.lead, self.states_of_values, self.tokens, self.channels))
        total = total + (0.0 if self.decay is None else self.decay[..., None])
        total = total + (0.0 if self.channel_decay is None else self.channel_decay)
        return total + (0.0 if self.head_decay is None else self.head_decay[:, None, None])

    @step
    def d_token_decay(self):
        return self.d_log_decay[..., :: self.steps, :]


@catalogue.mistake(why="The batch is padded and nobody tells the kernel.")
class lengths_ignored(Recurrence):
    """padded tokens count as real ones"""

    lengths = None


@catalogue.mistake(why="Document borders are handed to the convolution, but not to the rule.")
class reset_ignored(Recurrence):
    """the state is not emptied between documents"""

    reset = None


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="Training never used the final state, so nobody looked.")
class state_cotangent(Recurrence):
    """the cotangent of the final state is ignored"""

    @step
    def d_final_state(self):
        return np.zeros_like(super().d_final_state)


@catalogue.mistake(sides=("backward",), why="The initial state is taken for a constant.")
class initial_state_grad(Recurrence):
    """the initial state gets no gradient"""

    @step
    def d_state(self):
        return np.zeros_like(super().d_state)


@catalogue.mistake(sides=("backward",), why="A test that calls sum().backward() hands over ones.")
class dout_ignored(Recurrence):
    """the cotangent of the output is taken as 1"""

    @step
    def d_output(self):
        return np.where(self.real, np.ones_like(super().d_output), 0.0)


@catalogue.mistake(
    sides=("backward",), why="The scale is a constant in the forward, and no gradient is expected of it."
)
class scale_grad(Recurrence):
    """dq is not scaled"""

    @step
    def d_plain_queries(self):
        return self.d_queries


@catalogue.mistake(sides=("backward",), why="A learned scale is rare.")
class dscale(Recurrence):
    """the scale gets no gradient"""

    d_scale = 0.0


@catalogue.mistake(sides=("backward",), why="dgamma comes as a reversed running sum, and the sum runs forwards.")
class scan_order(Recurrence):
    """the gradient of the decays stands in reversed order of the tokens"""

    @step
    def d_token_decay(self):
        return super().d_token_decay[..., ::-1, :]
