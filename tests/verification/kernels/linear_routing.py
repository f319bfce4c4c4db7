"""Independent kernels of linear and routing attention for the verifier's tests: right ones, and broken ones.

Nothing here comes from refattn.  Routing kernels take members as given, or choose them; the loss is part of the result.
"""

import numpy as np


def linear(*, future_sum=False, state_ignored=False):
    """Recurrent forward and a backward by the reversed recurrence; each flag breaks one step."""

    def features(x, kind):
        return x if kind == "identity" else np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def slope(x, kind):
        return np.ones_like(x) if kind == "identity" else np.exp(np.minimum(x, 0))

    def prepare(q, k, v, feature_map, scale, state, normalizer, key_lengths):
        wide = np.float32 if q.dtype.itemsize < 4 else q.dtype
        q, k, v = (x.astype(wide) for x in (q, k, v))
        d, e = q.shape[-1], v.shape[-1]
        scale = (
            wide.type(d**-0.5 if scale is None else scale)
            if isinstance(wide, np.dtype)
            else np.float32(d**-0.5 if scale is None else scale)
        )
        real = np.ones((1, 1, k.shape[-2], 1), bool)
        if key_lengths is not None:
            real = (np.arange(k.shape[-2]) < np.reshape(key_lengths, (-1, 1)))[:, None, :, None]
        f, g = scale * features(q, feature_map), np.where(real, features(k, feature_map), 0)
        values = np.concatenate([np.where(real, v, 0), np.where(real, np.ones_like(v[..., :1]), 0)], axis=-1)
        start = np.zeros((*q.shape[:-2], d, e + 1), wide)
        if state is not None:
            start[..., :-1] = state
        if normalizer is not None:
            start[..., -1] = normalizer
        return q, k, f, g, values, start, scale, real

    def run(q, k, v, *, feature_map="elu", causal=False, scale=None, normalize=True, normalize_eps=0.0, state=None,
            normalizer=None, key_lengths=None, form=None, chunk=None):  # fmt: skip
        kind = q.dtype
        q, k, f, g, values, start, scale, _ = prepare(q, k, v, feature_map, scale, state, normalizer, key_lengths)
        running = start + np.swapaxes(g, -1, -2) @ values
        if causal:
            total = np.stack(
                [f[..., i, None, :] @ (start + np.swapaxes(g[..., : i + 1, :], -1, -2) @ values[..., : i + 1, :])
                 for i in range(q.shape[-2])], axis=-3,
            )[..., 0, :]  # fmt: skip
        else:
            total = f @ running
        divisor = total[..., -1:] + normalize_eps
        if future_sum:
            divisor = (f @ running)[..., -1:] + normalize_eps
        y = total[..., :-1]
        if normalize:
            y = y / np.where(divisor == 0, 1, divisor)
        return {"output": y.astype(kind), "state": running[..., :-1], "normalizer": running[..., -1]}

    def back(d_output, q, k, v, *, d_state=None, d_normalizer=None, feature_map="elu", causal=False, scale=None,
             normalize=True, normalize_eps=0.0, state=None, normalizer=None, key_lengths=None, form=None, chunk=None):  # fmt: skip
        raw_q, raw_k, f, g, values, start, factor, real = prepare(
            q, k, v, feature_map, scale, state, normalizer, key_lengths
        )
        weights = f @ np.swapaxes(g, -1, -2)
        seen = np.tri(*weights.shape[-2:], dtype=bool) if causal else np.ones(weights.shape[-2:], bool)
        weights = np.where(seen, weights, 0)
        total = weights @ values + f @ start
        every = g.sum(-2, keepdims=True) + start[..., None, :, -1]
        divisor = (np.sum(f * every, -1, keepdims=True) if future_sum else total[..., -1:]) + normalize_eps
        divisor = np.where(divisor == 0, 1, divisor)
        y = total[..., :-1]
        if normalize:
            d_n = d_output / divisor
            d_sum = -np.sum(d_n * y / divisor, -1, keepdims=True)
        else:
            d_n, d_sum = d_output, 0 * d_output[..., :1]
        d_total = np.concatenate([d_n, 0 * d_sum if future_sum else d_sum], axis=-1)
        d_last = np.zeros_like(start)
        if d_state is not None and not state_ignored:
            d_last[..., :-1] += d_state
        if d_normalizer is not None and not state_ignored:
            d_last[..., -1] += d_normalizer
        d_weights = np.where(seen, d_total @ np.swapaxes(values, -1, -2), 0)
        d_f = d_weights @ g + d_total @ np.swapaxes(start, -1, -2)
        d_g = np.swapaxes(d_weights, -1, -2) @ f + values @ np.swapaxes(d_last, -1, -2)
        d_values = np.swapaxes(weights, -1, -2) @ d_total + g @ d_last
        d_start = np.swapaxes(f, -1, -2) @ d_total + d_last
        if future_sum:  # the sum over all keys reaches every query
            d_f = d_f + d_sum * every
            d_every = np.sum(d_sum * f, axis=-2)
            d_g = d_g + d_every[..., None, :]
            d_start[..., -1] += d_every
        found = {
            "q": factor * d_f * slope(raw_q, feature_map),
            "k": np.where(real, d_g, 0) * slope(raw_k, feature_map),
            "v": np.where(real, d_values[..., :-1], 0),
        }
        if scale is not None:
            found["scale"] = np.sum(d_f * f / factor)
        if state is not None:
            found["state"] = d_start[..., :-1]
        if normalizer is not None:
            found["normalizer"] = d_start[..., -1]
        return found

    return run, back


def routing(*, summed=False, by_rank=False, overwritten=False):
    """One cluster after the other; each flag breaks one step."""

    def layer(x):
        centred = x - x.mean(-1, keepdims=True)
        factor = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + x.dtype.type(1e-6))
        return centred * factor, factor

    def clusters(q_n, k_n, mu, members, width, causal):
        """(batch, head, rows, columns, visible) of every cluster."""
        if members is None:
            members = [
                np.sort(np.argsort(-np.einsum("bhtd,hcd->bhct", x, mu), axis=-1, kind="stable")[..., :width], axis=-1)
                for x in (q_n, k_n)
            ]
        rows, columns = members
        for b, h, c in np.ndindex(rows.shape[:3]):
            i, j = rows[b, h, c], columns[b, h, c]
            seen = np.ones((len(i), len(j)), bool)
            if causal:
                seen = np.tri(len(i), len(j), dtype=bool) if by_rank else i[:, None] >= j
            yield b, h, i, j, seen

    def softmax(s, seen):
        s = np.where(seen, s, -np.inf)
        top = s.max(-1, keepdims=True)
        e = np.where(seen, np.exp(s - np.where(np.isfinite(top), top, 0)), 0)
        total = e.sum(-1, keepdims=True)
        return e / np.where(total > 0, total, 1)

    def gap(x, centroids):
        nearest = np.einsum("bhtd,hcd->bhtc", x, centroids).argmax(-1)
        return x - np.stack([centroids[h][nearest[:, h]] for h in range(len(centroids))], axis=1)

    def prepare(q, k, centroids):
        wide = np.float32 if q.dtype.itemsize < 4 else q.dtype
        q, centroids = q.astype(wide), centroids.astype(wide)
        k = q if k is None else k.astype(wide)
        return (*layer(q), *layer(k), centroids)

    def run(q, k, v, *, centroids, cluster_size, members=None, causal=False):
        same = k is None
        q_n, _, k_n, _, mu = prepare(q, k, centroids)
        values = v.astype(q_n.dtype)
        scale = q_n.dtype.type(q.shape[-1] ** -0.5)
        output, count = np.zeros((*q.shape[:-1], v.shape[-1]), q_n.dtype), np.zeros((*q.shape[:-1], 1), q_n.dtype)
        for b, h, i, j, seen in clusters(q_n, k_n, mu, members, cluster_size, causal):
            weights = softmax(scale * q_n[b, h][i] @ k_n[b, h][j].T, seen)
            output[b, h][i] += weights @ values[b, h][j]
            count[b, h][i] += 1
        loss = gap(q_n, mu) ** 2
        loss = loss.mean() if same else (loss.sum() + (gap(k_n, mu) ** 2).sum()) / (q_n.size + k_n.size)
        y = output if summed else output / np.where(count > 0, count, 1)
        return {"output": y.astype(q.dtype), "commitment_loss": loss}

    def back(d_output, q, k, v, *, d_commitment_loss=None, centroids, cluster_size, members=None, causal=False):
        same = k is None
        q_n, q_factor, k_n, k_factor, mu = prepare(q, k, centroids)
        values = v.astype(q_n.dtype)
        scale = q_n.dtype.type(q.shape[-1] ** -0.5)
        count = np.zeros((*q.shape[:-1], 1), q_n.dtype)
        for b, h, i, _, _ in clusters(q_n, k_n, mu, members, cluster_size, causal):
            count[b, h][i] += 1
        d_y = d_output if summed else d_output / np.where(count > 0, count, 1)
        d_q, d_k, d_v = np.zeros_like(q_n), np.zeros_like(k_n), np.zeros_like(values)
        for b, h, i, j, seen in clusters(q_n, k_n, mu, members, cluster_size, causal):
            weights = softmax(scale * q_n[b, h][i] @ k_n[b, h][j].T, seen)
            d_weights = d_y[b, h][i] @ values[b, h][j].T
            d_s = weights * (d_weights - np.sum(weights * d_weights, -1, keepdims=True))
            keep = 0 if overwritten else 1
            d_q[b, h][i] = keep * d_q[b, h][i] + scale * d_s @ k_n[b, h][j]
            d_k[b, h][j] = keep * d_k[b, h][j] + scale * d_s.T @ q_n[b, h][i]
            d_v[b, h][j] = keep * d_v[b, h][j] + weights.T @ d_y[b, h][i]
        if d_commitment_loss is not None:
            entries = q_n.size if same else q_n.size + k_n.size
            d_q = d_q + gap(q_n, mu) * (2 * d_commitment_loss / entries)
            if not same:
                d_k = d_k + gap(k_n, mu) * (2 * d_commitment_loss / entries)

        def through(normal, factor, d):
            return factor * (d - d.mean(-1, keepdims=True) - normal * (d * normal).mean(-1, keepdims=True))

        if same:
            return {"q": through(q_n, q_factor, d_q + d_k), "v": d_v}
        return {"q": through(q_n, q_factor, d_q), "k": through(k_n, k_factor, d_k), "v": d_v}

    return run, back
