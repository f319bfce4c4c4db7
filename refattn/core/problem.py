"""From the arrays of a call to the core's problem, and from its results and gradients back to the caller's shapes."""

import dataclasses
from typing import Any

from refattn.arrays import device, flatten_leading, namespace
from refattn.core import backward, forward
from refattn.core.options import Options, read, read_sizes
from refattn.normalization import Partial
from refattn.records import AttentionProblem, Result

__all__ = ["Prepared", "prepare"]


def prepare(q: Any, k: Any, v: Any, *, backend: Any, **settings: Any) -> "Prepared":
    """Check q (..., h, q, d), k (..., g, k, d), v (..., g, k, e) and the options; build the problem.

    ``settings`` are those of :func:`refattn.core.options.read`: the shared options, and a mechanism's own pattern, blocks,
    terms and extra keys.
    """
    sizes = read_sizes(q, k, v)
    xp = namespace(q, k, v)
    options = read(sizes, xp=xp, dtype=q.dtype, device=device(q), **settings)
    queries = options.heads.split(flatten_leading(q, 3, sizes.lead))
    if queries.shape[0] != sizes.b:  # the queries are shared by a batch that only the keys have
        queries = xp.broadcast_to(queries, (sizes.b, *queries.shape[1:]))
    parts = {f.name: getattr(options.settings, f.name) for f in dataclasses.fields(options.settings)}
    keys, values = (flatten_leading(x, 3, sizes.lead) for x in (k, v))
    return Prepared(options, AttentionProblem(**parts, q=queries, k=keys, v=values), backend)


class Prepared:
    """A problem in the core's layout, and the way back to the caller's."""

    def __init__(self, options: Options, problem: AttentionProblem, backend: Any) -> None:
        self.options, self.problem, self.backend = options, problem, backend
        self.lead = problem.sizes.lead

    def run(self) -> tuple[Result, forward.Forward]:
        """Result with output (..., h, q, e), lse (..., h, q) (and logits, weights), and what ``gradients`` needs."""
        keep = self.options.keep_weights
        if self.backend.fused:
            ok, reason = (False, "it keeps no weights") if keep else self.backend.serves(self.problem)
            if not ok:
                raise ValueError(f"backend {self.backend.name!r} does not serve this call: {reason}")
            done = forward.finish(self.problem, self.backend, Partial(*self.backend.forward(self.problem)))
        else:
            done = forward.forward(self.problem, self.backend, keep=keep)
        fields = {"output": self._by_head(done.output), "lse": self._by_head(done.lse)}
        if keep:
            fields.update(weights=self._by_head(done.weights), logits=self._by_head(done.logits))
        return Result(**fields), done

    def gradients(self, saved: forward.Forward, output: Any, lse: Any) -> dict[str, Any]:
        """Cotangents of q, k, v and the shared options from those of output and lse; broadcast axes are still to be summed."""
        d_output, d_lse = (
            None if d is None else self.options.heads.split(flatten_leading(d, keep, self.lead))
            for d, keep in ((output, 3), (lse, 2))
        )
        gradients = backward.backward(self.problem, self.backend, saved, d_output, d_lse)
        arrays = {"q": self._by_head(gradients.pop("q"))}
        arrays |= {n: self._by_key(gradients.pop(n)) for n in ("k", "v")}
        return {**arrays, **self.options.gradients(gradients)}

    def _by_head(self, x: Any) -> Any:
        """(b, g, r, q, ...) -> (..., h, q, ...)."""
        x = self.options.heads.join(x, 1)
        return namespace(x).reshape(x, (*self.lead, *x.shape[1:]))

    def _by_key(self, x: Any) -> Any:
        """(b|1, g, k, .) -> (..., g, k, .)."""
        lead = self.lead if x.shape[0] != 1 else (1,) * len(self.lead)
        return namespace(x).reshape(x, (*lead, *x.shape[1:]))
