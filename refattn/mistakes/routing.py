"""How people get routing attention wrong: who is in a cluster, how its outputs meet, normalisation, the loss, gradients."""

import numpy as np

from refattn.definitions.routing import Routing, normalised_backward
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue
from refattn.mistakes.scaled_dot_product import catalogue as dense

catalogue = Catalogue(
    Routing,
    built_on=dense,
    without=(
        "alibi_*", "bias_*", "cap_*", "causal_*", "dlse_ignored", "gqa_*", "keep_additive", "lengths_*", "lse_*", "mask_or_causal",
        "mask_drop", "none_mask", "pattern_drop", "score_mod_drop", "segments_*", "sink_*", "tail_*", "window_*", "merge_empty",
    ),
)  # fmt: skip
"""Without the mistakes with options that are not here."""


# ---------------------------------------------------------------------------------------------- causality


@catalogue.mistake(why="Ranks are at hand, positions are not; with shared members both say the same.")
class routing_rank_leak(Routing):
    """causal by rank where queries and keys have members of their own"""

    @step
    def causal_by(self):
        return "rank"


@catalogue.mistake(name="routing_rank_leak", why="The two readings of causal are mixed up.")
class routing_position_for_rank(Routing):
    """causal by position where rank is asked for"""

    @step
    def causal_by(self):
        return "position"


@catalogue.mistake(why="The flag stops at a wrapper.")
class causal_drop(Routing):
    """later tokens are seen"""

    causal = False


# ---------------------------------------------------------------------------------------------- the mean over clusters


@catalogue.mistake(why="scatter_add without the count.")
class routing_sum_not_mean(Routing):
    """the outputs of a token's clusters are summed"""

    @step
    def share(self):
        return 1.0 * self.alive[..., None]


@catalogue.mistake(name="routing_sum_not_mean", why="mean() over the cluster axis.")
class routing_mean_of_all(Routing):
    """the mean runs over all clusters, whether or not the token is in them"""

    @step
    def share(self):
        return self.alive[..., None] / self.clusters


@catalogue.mistake(why="out[index] = x keeps the last of several.")
class routing_scatter_overwrite(Routing):
    """the last of a token's clusters writes its output"""

    @step
    def share(self):
        return 1.0 * last_cluster(self.alive)


@catalogue.mistake(why="It looks like a guard against 0.")
class routing_eps_drop(Routing):
    """the constant in the mean is left out"""

    average_eps = 0.0


# ---------------------------------------------------------------------------------------------- membership


@catalogue.mistake(why="A distance is minimised where a product is to be maximised.")
class routing_farthest(Routing):
    """the tokens farthest from the centroid are taken"""

    @step
    def scores_q(self):
        return -super().scores_q

    @step
    def scores_k(self):
        return -super().scores_k


@catalogue.mistake(why="k-means assigns a token to one centroid.")
class routing_assignment(Routing):
    """members that are nearer to another centroid are dropped"""

    @step
    def chosen_q(self):
        return super().chosen_q & (self.scores_q == self.scores_q.max(-2, keepdims=True))

    @step
    def chosen_k(self):
        return super().chosen_k & (self.scores_k == self.scores_k.max(-2, keepdims=True))


@catalogue.mistake(why="range(w - 1).")
class routing_width(Routing):
    """one member too few"""

    @step
    def widths(self):
        return [max(1, w - 1) for w in super().widths]


@catalogue.mistake(why="Centroids are a parameter of the layer, not of its heads.")
class routing_heads(Routing):
    """the centroids of head 0 are used for all"""

    @step
    def scores_q(self):
        return np.einsum("...htd,cd->...hct", self.x_q, self.centroids[0])

    @step
    def scores_k(self):
        return np.einsum("...htd,cd->...hct", self.x_k, self.centroids[0])


@catalogue.mistake(why="top-k returns members by score, and the sort by position is left out.")
class routing_order(Routing):
    """members are ranked by score"""

    @step
    def place_q(self):
        right = super().place_q
        return right if self.members is not None else by_score(right, self.scores_q)

    @step
    def place_k(self):
        right = super().place_k
        return right if self.members is not None else by_score(right, self.scores_k)


@catalogue.mistake(why="The projection exists in one of two code bases.")
class routing_projection(Routing):
    """the projection is left out"""

    projection = None


# ---------------------------------------------------------------------------------------------- normalisation


@catalogue.mistake(why="A layer norm before the layer seems to be enough.")
class routing_norm(Routing):
    """queries and keys are not normalised for the logits"""

    normalize = None

    @step
    def routed_kind(self):
        kind = self.argument("cluster_normalize")
        return self.argument("normalize") if kind == "same" else kind


@catalogue.mistake(name="routing_norm", why="The paper says unit ball, its code a layer norm.")
class routing_unit_for_layer(Routing):
    """unit norm in place of layer norm, or the reverse"""

    @step
    def normalize(self):
        return OTHER_KIND[self.argument("normalize")]

    @step
    def routed_kind(self):
        kind = self.argument("cluster_normalize")
        return OTHER_KIND[self.argument("normalize") if kind == "same" else kind]


@catalogue.mistake(why="Keys are brought to norm 1 in one of two code bases.")
class routing_key_norm(Routing):
    """keys are not brought to norm 1"""

    @step
    def key_norm(self):
        return None


@catalogue.mistake(name="routing_key_norm", why="Keys are brought to norm 1 in one of two code bases.")
class routing_keys_unit(Routing):
    """keys are brought to norm 1 without being asked"""

    @step
    def key_norm(self):
        return "l2"


# ---------------------------------------------------------------------------------------------- self, memory, masks, relative


@catalogue.mistake(why="Ordinary causal attention sees the diagonal.")
class routing_self(Routing):
    """a token sees itself like any other"""

    self_attention = "always"


@catalogue.mistake(name="routing_self", why="Shared queries and keys make oneself win, so it is left out for good.")
class routing_self_never(Routing):
    """a token never sees itself"""

    self_attention = "never"


@catalogue.mistake(why="The memory belongs to one of two code bases.")
class memory_drop(Routing):
    """the memory is left out"""

    @step
    def memory_keys(self):
        return None

    @step
    def memory_values(self):
        return None

    d_memory_keys = 0.0
    d_memory_values = 0.0


@catalogue.mistake(why="Padding is a matter of the batch, not of the clusters.")
class mask_drop(Routing):
    """the masks are left out"""

    query_mask = None
    key_mask = None


@catalogue.mistake(why="The sign of j - i.")
class routing_relative(Routing):
    """relative rows are read in the other direction"""

    @step
    def gap(self):
        return -super().gap


@catalogue.mistake(name="routing_relative", why="Distances in the sequence are what the name says.")
class routing_relative_by_position(Routing):
    """relative rows go by position in place of rank"""

    @step
    def gap(self):
        by_position = np.arange(self.keys) - np.arange(self.queries)[:, None]
        return np.broadcast_to(by_position, super().gap.shape)


# ---------------------------------------------------------------------------------------------- the loss


@catalogue.mistake(why="sum() in place of mean().")
class routing_loss(Routing):
    """the loss is a sum"""

    entries = 1


@catalogue.mistake(name="routing_loss", why="The losses of queries and keys are added, shared ones twice.")
class routing_loss_twice(Routing):
    """the loss counts twice"""

    @step
    def entries(self):
        return super().entries / 2


@catalogue.mistake(sides=("backward",), why="The 2 of the square.")
class routing_loss_grad(Routing):
    """half the gradient of the loss"""

    @step
    def d_loss(self):
        return tuple(x / 2 for x in super().d_loss)


@catalogue.mistake(
    name="routing_loss_grad", sides=("backward",), why="The loss is computed under no_grad, with the centroids."
)
class routing_loss_constant(Routing):
    """no gradient of the loss"""

    @step
    def d_loss(self):
        return tuple(np.zeros_like(x) for x in super().d_loss)


# ---------------------------------------------------------------------------------------------- gradients


@catalogue.mistake(sides=("backward",), why="Normalised arrays are saved, and the cotangent is returned for them.")
class routing_norm_grad(Routing):
    """the normalisation counts as the identity in the backward"""

    @step
    def through_normal_q(self):
        return self.d_normal_q

    @step
    def through_normal_k(self):
        return self.d_unit_k

    @step
    def loss_in_q(self):
        return self.projected(self.d_loss[0])

    @step
    def loss_in_k(self):
        return self.projected(self.d_loss[1])

    def projected(self, d):
        return d if self.projection is None else np.einsum("...tf,df->...td", d, self.projection)


@catalogue.mistake(
    name="routing_norm_grad", sides=("backward",), why="The mean of a layer norm is taken for a constant."
)
class routing_norm_grad_scaled(Routing):
    """the backward of the normalisation of the keys is that of unit norm, whatever it was"""

    @step
    def through_normal_k(self):
        d = normalised_backward(self.normal_k, self.key_norm, self.d_unit_k)
        return normalised_backward(self.whole(self.given_keys), None if self.normalize is None else "l2", d)


@catalogue.mistake(sides=("backward",), why="grad[index] = x keeps the last of several.")
class grad_overwritten(Routing):
    """the gradients of a token's clusters overwrite each other"""

    @step
    def back_from_clusters(self):
        q, k, v = super().back_from_clusters
        last_q, last_k = last_cluster(self.place_q >= 0), last_cluster(self.place_k >= 0)
        return np.where(last_q, q, 0.0), np.where(last_k, k, 0.0), np.where(last_k, v, 0.0)


@catalogue.mistake(sides=("backward",), why="A token enters twice, and one way back is forgotten.")
class grad_subset(Routing):
    """shared queries get the gradient of their role as queries alone"""

    @step
    def d_q(self):
        return self.through_normal_q + self.loss_in_q


@catalogue.mistake(sides=("backward",), why="The count is applied after the gather.")
class routing_mean_grad(Routing):
    """the mean is left out of the backward"""

    @step
    def d_part(self):
        return np.where(self.share == 0, 0.0, 1.0) * self.cotangent("output")[..., None, :, :]


OTHER_KIND = {"layer": "l2", "l2": "layer", None: None}


def last_cluster(member):
    """(..., h, c, t, 1): the last of the clusters that a token is in."""
    later = np.flip(np.cumsum(np.flip(member, -2), axis=-2), -2)
    return (member & (later == 1))[..., None]


def by_score(place, scores):
    scores = np.where(place >= 0, scores, -np.inf)
    rank = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1, kind="stable")
    return np.where(place >= 0, rank, -1)
